"""An HTTP server with OpenAI's API for the engine of `linnet.inference`. Needs the extra `serve`.

listener = bind(settings := ServeConfig(port=8000))
serve(Service(Engine.of_run("runs/tnl-10m-0123456789ab"), settings), listener)
"""

from linnet.data.chat.template import ChatTemplate, load_chat_template
from linnet.serve.app import create_app
from linnet.serve.config import ServeConfig
from linnet.serve.server import Server, bind, serve
from linnet.serve.service import Service

__all__ = ["ChatTemplate", "ServeConfig", "Server", "Service", "bind", "create_app", "load_chat_template", "serve"]
