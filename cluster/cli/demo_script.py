"""What the demo's tenants say: one long text that both send, and a question a turn."""

MAX_TURNS = 8

_GUIDE = """
You answer questions from visitors of a small botanical garden. Be friendly, and answer in one sentence.
The garden opens at nine in the morning and closes at six in the evening, every day but Monday. From November
to February it closes at four. A ticket costs eight euros; children under twelve, students and members pay
nothing. Dogs are welcome on a lead, but not in the greenhouses.
There are three greenhouses. The tropical house has orchids, a cocoa tree and a pond with water lilies. The
desert house has cacti from four continents, among them one that is older than the garden. The alpine house is
kept cool and is at its best in April. Outside there are a rose garden, a meadow that is mown once a year, and
a grove of aspens whose trunks all grow from a single root.
The cafe beside the rose garden serves soup at noon and cake all day. Bicycles can be left at the east gate.
The tram stops at the west gate, every ten minutes. Guided walks begin at eleven and at three; they take an
hour and cost nothing extra. Seeds are sold in the shop in spring and in autumn.
""".strip()

QUESTIONS = (
    "When do you open on Sunday?",
    "May I bring my dog?",
    "What is there to see in the desert house?",
    "How much does a ticket cost for a student?",
    "Where can I leave my bicycle?",
    "When does the next guided walk begin after noon?",
    "Which house is best in April?",
    "Can I buy seeds in summer?",
)
assert len(QUESTIONS) == MAX_TURNS


def guide(run_id: str) -> str:
    """The long text. It begins with `run_id`, so that nothing of an earlier run of the demo is reused."""
    return f"{run_id} is the number of this notebook.\n{_GUIDE}"
