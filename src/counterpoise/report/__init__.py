"""What people look at: the report, the comparison, the token viewer.

Reads run folders only; never torch.
"""
