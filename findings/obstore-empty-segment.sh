#!/usr/bin/env bash
# obstore: one object whose key has an empty part makes a whole list fail.
#
# Guess: "list//b" is a valid key of S3, so it is listed, or at worst left out.
# Found (obstore 0.12.1, object_store behind it): list and list_with_delimiter raise InvalidPathError, and return none of
# the others. s3fs lists both.
source "$(dirname "$0")/environment.sh"
packages obstore==0.12.1 s3fs==2026.9.0 moto==5.2.5 flask==3.1.3 flask-cors==6.0.5
"$python" - <<'PROGRAM' 2>&1 | grep -v MotoServer
import logging
import os

os.environ.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_DEFAULT_REGION="us-east-1")
import obstore
import s3fs
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", port=0)
server.start()
url = "http://{}:{}".format(*server.get_host_and_port())
fs = s3fs.S3FileSystem(endpoint_url=url)
fs.mkdir("runs")
store = S3Store("runs", endpoint=url, client_options={"allow_http": True})
fs.pipe("runs/list/a", b"1")
print("obstore:", [each["path"] for batch in obstore.list(store, "list") for each in batch])
fs.pipe("runs/list//b", b"2")
for list_ in (lambda: list(obstore.list(store, "list")), lambda: obstore.list_with_delimiter(store, "list")):
    try:
        found = list_()
    except obstore.exceptions.InvalidPathError as error:
        print("obstore:", str(error).partition("\n")[0])
    else:
        raise AssertionError(found)
print("s3fs:", fs.find("runs/list"))
server.stop()
PROGRAM
# Output:
#   obstore 0.12.1
#   s3fs 2026.9.0
#   moto 5.2.5
#   flask 3.1.3
#   flask-cors 6.0.5
#   obstore: ['list/a']
#   obstore: Encountered object with invalid path: Path "list//b" contained empty path segment
#   obstore: Encountered object with invalid path: Path "list//" contained empty path segment
#   s3fs: ['runs/list//b', 'runs/list/a']
