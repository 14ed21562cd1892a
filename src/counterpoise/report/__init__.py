"""The report of a run and the comparison of several: pages, charts and the numbers behind them.

Reads run folders only; never torch.
"""
