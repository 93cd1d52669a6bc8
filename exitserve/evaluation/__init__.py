"""`exitserve eval`: quality against depth, by the oracle and by tasks on a running server."""
