"""How many bytes each node may take."""

from coordinator.planning.budgets import Offer, budgets


def test_nodes_of_one_machine_share_what_it_offers_and_the_configuration_counts() -> None:
    elsewhere, here, configured = Offer(70, None), Offer(999, None, is_here=True), Offer(999, 5, is_here=True)
    assert list(budgets(Offer(90, None), [elsewhere, here, configured])) == [30, 70, 30, 5]
    assert list(budgets(Offer(90, 8), [Offer(70, 6)])) == [8, 6]
