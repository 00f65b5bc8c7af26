"""What a server is told at its start: where it listens, whom it lets in, and how much it takes."""

import ipaddress

from pydantic import Field, SecretStr, field_validator

from linnet.config import Config


class ServeConfig(Config):
    """Settings of the HTTP server; those of the engine (slots, device) are the engine's.

    Attributes:
        allowed_hosts: names in the Host header that are answered, "*" for all. Empty: where the server listens on
            loopback alone only loopback's names, so that a page in a browser cannot reach it under a name of its own;
            elsewhere all.
        queue: choices that may wait for a slot; more are refused with 429.
    """

    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(8000, ge=0, le=65535, description="0 takes a free one")
    api_key: SecretStr | None = Field(None, description="what /v1 asks for as a bearer token")
    allowed_hosts: list[str] = []
    queue: int = Field(256, ge=0)
    max_tokens: int = Field(16384, ge=1, description="most tokens that a completion may ask for")
    max_prompt_tokens: int = Field(131072, ge=1)
    max_choices: int = Field(128, ge=1, description="most completions of one request: prompts times n")
    max_body: int = Field(4 << 20, ge=1, description="bytes of a request")
    body_timeout: float = Field(30.0, gt=0, allow_inf_nan=False, description="seconds for a request to arrive")
    stream_timeout: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="seconds that a client may read nothing of a response"
    )
    stream_backlog: int = Field(4096, ge=1, description="tokens that a stream may be behind its client's reading")
    grace: float = Field(30.0, ge=0, allow_inf_nan=False, description="seconds for responses to end at shutdown")

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, key: SecretStr | None) -> SecretStr | None:
        text = None if key is None else key.get_secret_value()
        if text is not None and not (text.isascii() and text.isprintable() and text and " " not in text):
            raise ValueError("must be printable ASCII without spaces, and not empty, to fit into a header")
        return key

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names of `allowed_hosts` with those that are always right, None where all are."""
        if "*" in self.allowed_hosts or not (self.loopback or self.allowed_hosts):
            return None
        return frozenset({"localhost", "127.0.0.1", "[::1]", self.host.lower(), *map(str.lower, self.allowed_hosts)})
