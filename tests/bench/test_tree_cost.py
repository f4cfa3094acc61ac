from bench.kv_memory.tree_cost import NAME_TO_POLICY, cost_table


def test_every_policy_is_measured_at_every_size() -> None:
    table = cost_table([20, 60])
    assert [row[:2] for row in table.rows] == [(n, k) for n in NAME_TO_POLICY for k in (20, 60)]
    assert all(isinstance(cost, float) and cost > 0 for row in table.rows for cost in row[2:])
