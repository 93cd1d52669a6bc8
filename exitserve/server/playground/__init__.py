"""The playground: a page on which people try the model, see where tokens stop, and why."""
