"""The released code's versions of the methods: the released code is the FedDIP repository's."""
