"""The charts of the report: what each shows, and how it is drawn."""
