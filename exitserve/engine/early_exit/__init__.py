"""Early exit: rows leave where they are sure enough, and their keys and values are propagated."""
