"""Arithmetic that several subjects share: reductions, the language-model head, the prefix trie, KL,
intervals.
"""
