"""The page: its tabs, its looks, and the server behind it.

desk = Desk(models, thread, visitors, limits)
page = build(desk)
serve(page, desk, host="127.0.0.1", port=7860)     # its URL; nothing is asked of any other host
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import gradio as gr
from gradio.routes import App
from gradio.tunneling import CURRENT_TUNNELS
from gradio.utils import get_upload_folder

from web.ask_tab import AskTab
from web.asking import Desk
from web.attribution_tab import WhereTab
from web.guard import Guard, Hosts
from web.uploads import Uploads

CSS, JS = (Path(__file__).with_name(f"page.{kind}") for kind in ("css", "js"))
# The theme's own colours are too light on white: text has to differ from its ground by 4.5 to 1.
CONTRAST = {
    "body_text_color_subdued": "*neutral_600",
    "input_placeholder_color": "*neutral_600",
    "input_placeholder_color_dark": "*neutral_400",
    "color_accent": "*primary_600",
    "button_primary_background_fill": "*primary_600",
    "button_primary_background_fill_hover": "*primary_700",
}
WAITING = 64  # questions in Gradio's queue, before the next one is refused
SESSIONS = 100  # whose components' values Gradio keeps
LOOK_EVERY = 600  # seconds, for uploads that are old
# Gradio counts events for a dashboard that is switched off here: a few are enough, and no summary of them.
SETTINGS = {"GRADIO_ANALYTICS_MAX_EVENTS": "100", "GRADIO_ANALYTICS_CACHE_FREQUENCY": "1000000000"}


def build(desk: Desk, remember: bool = False) -> gr.Blocks:
    """The page for a desk. `remember` as for `AskTab`."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with gr.Blocks(title="Ocelli", analytics_enabled=False, fill_width=True) as page:
        gr.Markdown("# Ocelli\nAsk small vision-language models about images.", elem_id="title")
        with gr.Tabs():
            with gr.Tab("Ask"):
                AskTab(desk, remember)
            with gr.Tab("Where did it look"):
                WhereTab(desk)

        def closed(request: gr.Request) -> None:
            desk.visitors.remove(request.session_hash or "")

        page.unload(closed)
    page.queue(max_size=WAITING, default_concurrency_limit=None)
    return page


def serve(
    page: gr.Blocks,
    desk: Desk,
    host: str,
    port: int,
    share: bool = False,
    browser: bool = False,
    allowed_hosts: Sequence[str] = (),
) -> str:
    """Start serving in threads of its own: the page's URL.

    Args:
        allowed_hosts: names of the page besides those of this machine, see `Hosts`.
        share: through Gradio's tunnel, for everyone on the internet who knows its URL.
        browser: open one.

    Raises:
        OSError: the port is taken, or the server took more than five seconds to begin.
    """
    limits = desk.limits
    space = os.environ.get("SPACE_HOST")  # a Space of Hugging Face is asked by its own name
    hosts = Hosts(host, [*allowed_hosts, *([space] if space else [])])
    uploads = Uploads(get_upload_folder(), limits.max_uploaded_bytes, limits.max_uploaded_files)

    @asynccontextmanager
    async def guarded(app: App) -> AsyncIterator[None]:
        """In front of all that Gradio puts in front of its routes, before the first request comes."""
        largest = limits.max_images * (limits.max_file_bytes + 2**16)
        app.middleware_stack = Guard(
            app.middleware_stack, hosts, uploads, desk.visitors.connected, max_upload=largest
        )
        looking = asyncio.create_task(_look_again(uploads))
        yield
        looking.cancel()

    with no_proxy_to("localhost", "127.0.0.1", "::1", host):
        _, url, shared = page.launch(
            server_name=host,
            server_port=port,
            share=share,
            inbrowser=browser,
            prevent_thread_lock=True,
            quiet=True,
            show_error=True,
            max_file_size=limits.max_file_bytes,
            state_session_capacity=SESSIONS,
            run_history=False,
            enable_monitoring=False,
            footer_links=[],
            ssr_mode=False,
            mcp_server=False,
            pwa=False,
            theme=gr.themes.Default(
                primary_hue="indigo", neutral_hue="slate", font=["sans-serif"], font_mono=["monospace"]
            ).set(**CONTRAST),
            css_paths=[CSS],
            js=JS.read_text(encoding="utf-8"),
            app_kwargs={"lifespan": guarded},
            # Without a second look whether it answers, which gives up after three seconds: it has just been
            # asked for its start-up events.
            _frontend=False,
        )
    if shared:
        hosts.allowed.add(urlsplit(shared).hostname)
    return shared or url


def close(page: gr.Blocks, seconds: float = 1.0) -> None:
    """End a page, within so many seconds: open connections are broken off, without a word about each of them,
    and what is still at work in a thread is left to end with the process."""
    for tunnel in CURRENT_TUNNELS:
        tunnel.kill()
    page.server.config.timeout_graceful_shutdown = 0
    logging.getLogger("uvicorn.error").disabled = True
    ending = threading.Thread(target=page.close, kwargs={"verbose": False}, daemon=True)
    ending.start()
    ending.join(seconds)


async def _look_again(uploads: Uploads) -> None:
    while True:
        await asyncio.sleep(LOOK_EVERY)
        await asyncio.to_thread(uploads.make_room)


@contextmanager
def no_proxy_to(*hosts: str) -> Iterator[None]:
    """Inside, this process asks these hosts itself, where the environment names a proxy for all others."""
    names = ("no_proxy", "NO_PROXY")
    before = {name: os.environ[name] for name in names if name in os.environ}
    direct = ",".join([*before.values(), *hosts])
    os.environ.update(dict.fromkeys(names, direct))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        os.environ.update(before)
