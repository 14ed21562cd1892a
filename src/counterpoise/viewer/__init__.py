"""The token viewer: a local page, or one file to send. Reads run folders only."""
