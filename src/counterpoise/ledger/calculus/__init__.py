"""Why a token changed: log-probs as a function of the parameters, forward mode, decomposition,
closed forms of the head.
"""
