"""What the code released in the FedDIP repository does instead, method by method."""
