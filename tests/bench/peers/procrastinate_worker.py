"""procrastinate: an asynchronous task that POSTs, in an asynchronous worker."""

import asyncio
import os
import sys

import aiohttp
import procrastinate

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=os.environ["DATABASE_URL"])
)
url = os.environ["FRONTEND_BASE_URL"] + "/api/ingest/sync"
session: aiohttp.ClientSession


@app.task(name="post")
async def post(entry: dict) -> None:
    async with session.post(url, json={"entries": [entry]}) as answer:
        said = await answer.json()
        if answer.status != 200 or said["ok"] is not True:
            raise RuntimeError(f"HTTP {answer.status}")


async def main() -> None:
    global session
    async with app.open_async():
        if sys.argv[1:] == ["prepare"]:
            await app.schema_manager.apply_schema_async()
            return
        async with aiohttp.ClientSession() as session:
            await app.run_worker_async(concurrency=int(os.environ["BENCH_CONCURRENCY"]))


asyncio.run(main())
