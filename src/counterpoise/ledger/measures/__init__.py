"""What is read off a token's change: flips, sharing, residuals, drift, categories."""
