"""Give the pipes, environment and folder of this process to a worker, and wait until it ends.

What xdist starts in place of Python: see :mod:`tests.workers`. It imports nothing that takes long.
"""

import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as nursery:
    nursery.connect(sys.argv[1])
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    message = os.fsencode("\0".join([os.getcwd(), *variables]))
    socket.send_fds(nursery, [message], [0, 1, 2])
    for descriptor in range(3):  # so that who reads sees when the worker ends
        os.close(descriptor)
    nursery.recv(1)
