"""pgqueuer on asyncpg and uvloop, as in its own benchmark (BENCH_WORKERS in one process): an
entrypoint that POSTs."""

import asyncio
import json
import os
import sys

import aiohttp
import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

url = os.environ["FRONTEND_BASE_URL"] + "/api/ingest/sync"
ENTRIES = """
    select json_build_object('entityType', entity_type, 'entityId', entity_id, 'payload', payload,
                             'createdAt', created_at, 'seq', id)::text
    from sync_outbox order by id
"""


async def consume(session: aiohttp.ClientSession) -> None:
    worker = PgQueuer(AsyncpgDriver(await asyncpg.connect(os.environ["DATABASE_URL"])))

    @worker.entrypoint("post")
    async def post(job: Job) -> None:
        body = {"entries": [json.loads(job.payload or b"")]}
        async with session.post(url, json=body) as answer:
            said = await answer.json()
            if answer.status != 200 or said["ok"] is not True:
                raise RuntimeError(f"HTTP {answer.status}")

    await worker.run(batch_size=int(os.environ["BENCH_BATCH"]))


async def prepare() -> None:
    connection = await asyncpg.connect(os.environ["DATABASE_URL"])
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    rows = [row[0].encode() for row in await connection.fetch(ENTRIES)]
    for at in range(0, len(rows), 1000):
        some = rows[at : at + 1000]
        await queries.enqueue(["post"] * len(some), some, [0] * len(some))


async def main() -> None:
    async with aiohttp.ClientSession() as session:
        workers = int(os.environ["BENCH_WORKERS"])
        await asyncio.gather(*(consume(session) for _ in range(workers)))


uvloop.run(prepare() if sys.argv[1:] == ["prepare"] else main())
