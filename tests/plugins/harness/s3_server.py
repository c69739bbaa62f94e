"""A local S3 server (moto) with the environment variables that select it, and its objects."""

import logging
import sys
from typing import Any

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class S3Server:
    """A server whose state ends with it; ``address`` is the IP address that it listens at."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
        self._server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self.environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.url}

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.url, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
        )

    def make_bucket(self, name: str) -> str:
        self.client().create_bucket(Bucket=name)
        return name

    def upload(self, bucket: str, key: str, content: bytes) -> None:
        self.client().put_object(Bucket=bucket, Key=key, Body=content)

    def objects(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        client = self.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return {key.removeprefix(prefix): client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}

    def stop(self) -> None:
        self._server.stop()
        if "s3fs" in sys.modules:  # its file systems keep the address
            sys.modules["s3fs"].S3FileSystem.clear_instance_cache()
