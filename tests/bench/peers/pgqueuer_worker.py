"""pgqueuer on asyncpg and uvloop, as its own benchmark runs it: an entrypoint that POSTs."""

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


async def main() -> None:
    connection = await asyncpg.connect(os.environ["DATABASE_URL"])
    driver = AsyncpgDriver(connection)
    if sys.argv[1:] == ["prepare"]:
        queries = Queries(driver)
        await queries.install()
        rows = [row[0].encode() for row in await connection.fetch(ENTRIES)]
        for at in range(0, len(rows), 1000):
            some = rows[at : at + 1000]
            await queries.enqueue(["post"] * len(some), some, [0] * len(some))
        return
    worker = PgQueuer(driver)
    async with aiohttp.ClientSession() as session:

        @worker.entrypoint("post")
        async def post(job: Job) -> None:
            body = {"entries": [json.loads(job.payload or b"")]}
            async with session.post(url, json=body) as answer:
                said = await answer.json()
                if answer.status != 200 or said["ok"] is not True:
                    raise RuntimeError(f"HTTP {answer.status}")

        await worker.run(batch_size=int(os.environ.get("BENCH_BATCH", "100")))


uvloop.run(main())
