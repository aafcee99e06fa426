-- What version 1 of the schema was, as it was released; an upgrade begins with it.

create table serversync.schema_version (number int primary key);

-- All entries of one call share a lane.
create function serversync.lane(payload jsonb, entity_id uuid) returns text
language sql immutable parallel safe as $$
    select md5(lower(coalesce(payload->>'callLogId', payload->>'call_log_id', entity_id::text)))
$$;

-- Text from outside as a uuid, or null.
create function serversync.to_uuid(name text) returns uuid
language sql immutable parallel safe as $$
    select case when name ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then name::uuid end
$$;

-- An entry as the frontend gets it; `uploaded` goes over what its payload says. One concat(), as ||
-- copies the text each time; an expensive argument that stood twice would keep it from inlining.
create function serversync.entry(
    seq bigint, entity_type text, entity_id uuid, payload jsonb, created_at timestamptz,
    op text, uploaded jsonb
) returns text language sql stable parallel safe as $$
    select concat('{"entityType":', to_json(entity_type), ',"entityId":"', entity_id,
        '","payload":', coalesce(payload || uploaded, payload),
        ',"createdAt":', to_json(created_at), ',"seq":', seq,
        case when op is not null then concat(',"op":', to_json(op)) end, '}')
$$;

-- Entries that wait: after a failure, or because their file is not ready.
create table serversync.failures (
    outbox_id bigint primary key,
    entity_type text not null,
    is_file boolean not null,
    lane text not null,
    tries int not null,                    -- drives the backoff
    attempts int not null,                 -- what was charged
    successes bigint not null,             -- the endpoint's counter at this failure
    next_attempt_at timestamptz not null,
    error_code text not null,
    error text not null,
    http_status int,
    first_failed_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    waited double precision not null default 0  -- seconds of the agent's own running time
);
create index on serversync.failures (lane, outbox_id);
create index on serversync.failures (next_attempt_at);

-- Confirmed uploads whose local files still exist: deletion works from this table alone.
create table serversync.uploads (
    outbox_id bigint primary key,
    directory text not null,
    files jsonb not null,                  -- [{name, inode, size, mtime_ns}] as they were sent
    file_url text not null,
    uploaded_at timestamptz not null default now(),
    tries int not null default 0,
    error text
);

create table serversync.dead_letters (
    id uuid primary key default gen_random_uuid(),
    outbox_id bigint not null unique,
    original_topic text not null,
    entity_id uuid not null,
    payload jsonb not null,
    rest jsonb not null,                   -- the outbox row's other columns: it may come back
    error_code text not null,
    error_message text not null,
    http_status int,
    attempts int not null,
    retry_count int not null default 0,
    max_retries int not null default 3,
    status text not null default 'PENDING'
        check (status in ('PENDING', 'RETRYING', 'RESOLVED', 'DEAD')),
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    last_retry_at timestamptz
);
create index on serversync.dead_letters (original_topic, created_at);
create index on serversync.dead_letters (outbox_id) where status = 'RETRYING';

-- A receipt for each confirmed request. Lane and entity only for files: a call has one recording.
create table serversync.deliveries (
    id bigint generated always as identity primary key,
    kind text not null,
    first_seq bigint not null,
    last_seq bigint not null,
    entries int not null,
    bytes bigint not null,
    idempotency_key text,
    request_sha256 text,
    answer_sha256 text,
    http_status int,
    outcome text not null,
    started_at timestamptz not null,
    duration_ms int not null,
    lane text,
    entity_id uuid,
    url text
);
create index on serversync.deliveries (started_at);
create index on serversync.deliveries (lane) where lane is not null;
create index on serversync.deliveries (entity_id) where entity_id is not null;

create table serversync.counters (
    name text, label text, value double precision not null, primary key (name, label)
) with (fillfactor = 50);

create table serversync.sender (
    only_row boolean primary key default true check (only_row),
    id uuid not null default gen_random_uuid(),  -- tells this database from any other
    epoch bigint not null default 0,
    device text,
    root_id text
);
insert into serversync.sender default values;

-- Entries that a retry or a replay put back into the queue: since when they wait. For the numbers
-- only, and kept for a day after.
create table serversync.revived (
    outbox_id bigint primary key, revived_at timestamptz not null default now()
);

-- Whether anybody holds the sender's lock.
create function serversync.locked(key bigint) returns boolean language sql stable as $$
    select exists (
        select from pg_locks l join pg_database b on b.oid = l.database
        where l.locktype = 'advisory' and l.granted and b.datname = current_database()
          and (l.classid::bigint << 32 | l.objid::bigint) = key)
$$;

create table serversync.idempotency_keys (
    key text primary key,
    digest bytea not null,
    outbox_id bigint not null,
    expires_at timestamptz not null
);

-- The same key ten times is one row; the same key with something else is an error.
create function serversync.enqueue(
    entity_type text, entity_id uuid, payload jsonb, idempotency_key text default null
) returns bigint language plpgsql as $$
declare
    mine bytea := sha256(convert_to(entity_type || ' ' || entity_id || ' ' || payload, 'UTF8'));
    seq bigint;
    known record;
begin
    if idempotency_key is not null then
        insert into serversync.idempotency_keys as k (key, digest, outbox_id, expires_at)
        values (idempotency_key, mine, 0, now() + interval '30 days')
        on conflict (key) do update set key = excluded.key  -- locks the row of the first caller
        returning * into known;
        if known.outbox_id <> 0 and known.expires_at > now() then
            if known.digest <> mine then
                raise exception 'idempotency key % was used with another payload', idempotency_key
                    using errcode = 'unique_violation';
            end if;
            return known.outbox_id;
        end if;
    end if;
    insert into sync_outbox (entity_type, entity_id, payload)
    values (enqueue.entity_type, enqueue.entity_id, enqueue.payload) returning id into seq;
    update serversync.idempotency_keys k
    set outbox_id = seq, digest = mine, expires_at = now() + interval '30 days'
    where k.key = idempotency_key;
    return seq;
end $$;

-- A constant payload: PostgreSQL folds a transaction's notifications into one. A trigger that
-- fails would end the backend's transaction: whatever goes wrong here, the call can still end.
create function serversync.wake() returns trigger language plpgsql as $$
begin
    perform pg_notify('serversync', '');
    return null;
exception when others then
    return null;
end $$;

-- What came back from the frontend: a row a section.
create table serversync.settings (
    section text primary key,
    position int not null,
    pulls bigint not null default 0,       -- tells whether another pull came between
    digest text,                           -- of the rows as they were applied last; null: never
    counts jsonb not null default '{}',    -- what these were, {"groups": 3, "numbers": 12}
    remarks jsonb not null default '[]',   -- [{item, reason, skipped}] of the last answer
    skipped int not null default 0,
    pulled_at timestamptz,
    changed_at timestamptz,
    error text,                            -- why the last answer was not applied
    held_counts jsonb,                     -- what came when it looked like a loss; null: not held
    held_times int not null default 0,     -- in a row
    held_seconds double precision not null default 0  -- of the agent's own running time
) with (fillfactor = 50);
insert into serversync.settings (section, position)
values ('number-groups', 1), ('call-actions', 2), ('announcements', 3), ('ivr-flows', 4);

-- The announcements' audio: what is wanted, and what the agent itself put there.
create table serversync.audio_files (
    name text primary key,
    version text not null,                 -- the frontend's updatedAt
    fetched text,                          -- the version that is there
    fetched_at timestamptz,
    files jsonb not null default '[]',     -- [{inode, size, mtime_ns, sha256}] as they were written
    etag text,
    tries int not null default 0,
    next_attempt_at timestamptz not null default now(),
    error text,
    unwanted double precision              -- seconds of the agent's own running time; null: wanted
);

-- Stand-ins, always empty and last in the agent's search_path: where the backend has no such
-- table, the same statements find these.
create table serversync.recordings (
    id uuid primary key, call_log_id uuid, upload_status text, s3_url text, file_size_bytes bigint
);
create table serversync.system_settings (id int primary key, extra jsonb);

insert into serversync.schema_version values (1);
