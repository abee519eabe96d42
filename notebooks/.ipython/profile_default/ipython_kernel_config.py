# Kernels here listen on loopback alone: no warning about unencrypted TCP.
c.IPKernelApp.log_level = 40  # noqa: F821
