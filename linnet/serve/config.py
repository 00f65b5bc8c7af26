"""Settings of the HTTP server: address, access and limits."""

import ipaddress

from pydantic import Field, SecretStr, field_validator

from linnet.config import Config, Seconds


class ServeConfig(Config):
    """Settings of the HTTP server; the engine has its own (slots, device).

    Attributes:
        host: address to listen on.
        allowed_hosts: accepted names in the Host header, "*" for all. If empty, a server on loopback accepts only names
            of loopback, so that a web page cannot reach it under its own domain name; other servers accept all.
        queue: completions that may wait for a slot; further ones are refused with status 429.
        max_prompt_tokens: upper bound of tokens per prompt.
    """

    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(8000, ge=0, le=65535, description="port; 0 takes a free one")
    api_key: SecretStr | None = Field(None, description="bearer token that /v1 requires")
    allowed_hosts: list[str] = []
    queue: int = Field(256, ge=0)
    max_tokens: int = Field(16384, ge=1, description="upper bound of max_tokens per completion")
    max_prompt_tokens: int = Field(131072, ge=1)
    max_choices: int = Field(128, ge=1, description="upper bound of completions per request: prompts times n")
    max_body: int = Field(4 << 20, ge=1, description="upper bound of bytes per request")
    header_timeout: Seconds = Field(10.0, description="seconds for the headers of a request to arrive")
    body_timeout: Seconds = Field(30.0, description="seconds for the body of a request to arrive")
    stream_timeout: Seconds = Field(60.0, description="seconds without reading after which a client is disconnected")
    stream_backlog: int = Field(4096, ge=1, description="tokens that a stream may be ahead of its client")
    grace: float = Field(30.0, ge=0, le=1e8, description="seconds for responses to end at shutdown")

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, key: SecretStr | None) -> SecretStr | None:
        text = None if key is None else key.get_secret_value()
        if text is not None and not (text.isascii() and text.isprintable() and text and " " not in text):
            raise ValueError("must be printable ASCII without spaces, and not empty, so that a header can carry it")
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
        """The accepted host names, or None if all are accepted."""
        if "*" in self.allowed_hosts or not (self.loopback or self.allowed_hosts):
            return None
        return frozenset({"localhost", "127.0.0.1", "[::1]", self.host.lower(), *map(str.lower, self.allowed_hosts)})
