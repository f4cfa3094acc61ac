"""Small facts that launches are sized by."""


def next_power_of_2(number: int) -> int:
    """The least power of two that is `number` or more; `number` at least 1."""
    return 1 << (number - 1).bit_length()


def ceil_div(number: int, divisor: int) -> int:
    """How many runs of `divisor` cover `number`."""
    return -(-number // divisor)
