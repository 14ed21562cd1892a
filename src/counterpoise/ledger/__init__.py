"""The ledger: what an update did to every token, and why."""
