#!/usr/bin/env bash
# fsspec on S3: an error inside "with fs.open(path, 'wb')" uploads what was written, over the object that was there.
#
# Guess: an upload that ends with an error is aborted, and the object that was there stays.
# Found (s3fs 2026.9.0, torch 2.13.0): the file is closed as if all had been written. A torch.save that fails, since
# something in the dictionary cannot be pickled, leaves 674 bytes in place of the checkpoint of the same name.
source "$(dirname "$0")/environment.sh"
packages s3fs==2026.9.0 torch==2.13.0 moto==5.2.5 flask==3.1.3 flask-cors==6.0.5
"$python" - <<'PROGRAM' 2>&1 | grep -v MotoServer
import logging
import os
import threading

os.environ.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_DEFAULT_REGION="us-east-1")
import s3fs
import torch
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", port=0)
server.start()
fs = s3fs.S3FileSystem(endpoint_url="http://{}:{}".format(*server.get_host_and_port()))
fs.mkdir("runs")


def save(what):
    with fs.open("runs/model.pt", "wb") as file:
        torch.save(what, file)


def size():
    fs.invalidate_cache()
    return fs.info("runs/model.pt")["size"]


save({"weight": torch.ones(1000)})
good = size()
print(f"a checkpoint of {good:,} bytes")
try:
    save({"weight": torch.ones(1000), "lock": threading.Lock()})
except TypeError as error:
    print("the next save:", error)
print(f"now there are {size():,} bytes")
assert size() < good
try:
    torch.load(fs.open("runs/model.pt", "rb"))
except RuntimeError as error:
    print("torch.load:", str(error).partition(":")[0])
else:
    raise AssertionError("it is loaded")
server.stop()
PROGRAM
# Output:
#   s3fs 2026.9.0
#   torch 2.13.0+cpu
#   moto 5.2.5
#   flask 3.1.3
#   flask-cors 6.0.5
#   a checkpoint of 5,545 bytes
#   the next save: cannot pickle '_thread.lock' object
#   now there are 674 bytes
#   torch.load: PytorchStreamReader failed locating file data.pkl
