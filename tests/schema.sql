-- The backend's tables, as far as serversync meets them. The backend owns them; the tests only play the backend.

CREATE TABLE sync_outbox (
    id           bigserial PRIMARY KEY,
    entity_type  varchar(30) NOT NULL,
    entity_id    uuid NOT NULL,
    payload      jsonb NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    processed_at timestamptz
);

-- The backend's only index on it: by created_at, although the agent reads by id.
CREATE INDEX idx_sync_outbox_pending ON sync_outbox (created_at) WHERE processed_at IS NULL;

CREATE TABLE recordings (
    id              uuid PRIMARY KEY,
    call_log_id     uuid,
    recording_type  varchar(20),
    sequence_number smallint,
    file_path       text NOT NULL,
    s3_url          text,
    upload_status   varchar(20) NOT NULL DEFAULT 'local_only',
    duration_sec    int,
    format          varchar(10) CHECK (format IN ('wav', 'mp3')),
    file_size_bytes bigint,
    started_at      timestamptz,
    ended_at        timestamptz,
    synced_at       timestamptz,
    created_at      timestamptz DEFAULT now(),
    CONSTRAINT chk_upload_status
        CHECK (upload_status IN ('local_only', 'uploading', 'uploaded', 'upload_failed'))
);

CREATE TABLE system_settings (
    id         int PRIMARY KEY,
    extra      jsonb NOT NULL DEFAULT '{}',
    updated_at timestamptz NOT NULL DEFAULT now()
);

INSERT INTO system_settings (id) VALUES (1);
