"""The loop of the classical outbox worker: the oldest entries, one POST an entry, mark each."""

import json
import os
import time

import psycopg
import urllib3

FETCH = """
    select id, entity_type, entity_id::text, payload, created_at from sync_outbox
    where processed_at is null order by id limit 100
"""
MARK = "update sync_outbox set processed_at = now() where id = %s"

url = os.environ["FRONTEND_BASE_URL"] + "/api/ingest/sync"
pool = urllib3.PoolManager()
with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
    while True:
        rows = connection.execute(FETCH).fetchall()
        for seq, kind, entity, payload, created in rows:
            entry = {
                "entityType": kind,
                "entityId": entity,
                "payload": payload,
                "createdAt": created.isoformat(),
                "seq": seq,
            }
            body = json.dumps({"entries": [entry]})
            headers = {"Content-Type": "application/json"}
            answer = pool.request("POST", url, body=body, headers=headers)
            if answer.status == 200 and json.loads(answer.data)["ok"] is True:
                connection.execute(MARK, (seq,))
        if not rows:
            time.sleep(0.5)
