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

-- What comes back from the frontend.

CREATE TABLE registered_numbers (
    id                uuid PRIMARY KEY,
    phone_number      varchar(20) NOT NULL CHECK (phone_number ~ '^\+[1-9][0-9]{1,14}$'),
    name              varchar(100),
    category          varchar(20) NOT NULL DEFAULT 'general',
    action_code       varchar(2) NOT NULL DEFAULT 'VR',
    ivr_flow_id       uuid,
    recording_enabled boolean NOT NULL DEFAULT true,
    announce_enabled  boolean NOT NULL DEFAULT true,
    notes             text,
    version           int DEFAULT 1,
    deleted_at        timestamptz,
    created_at        timestamptz NOT NULL,
    updated_at        timestamptz NOT NULL,
    group_id          uuid,
    group_name        varchar(255)
);
CREATE UNIQUE INDEX ON registered_numbers (phone_number) WHERE deleted_at IS NULL;

CREATE TABLE call_action_rules (
    id              uuid PRIMARY KEY,
    name            varchar(255) NOT NULL,
    caller_group_id uuid,
    action_type     varchar(10) NOT NULL CHECK (action_type IN ('allow', 'deny')),
    action_config   jsonb NOT NULL,
    priority        int NOT NULL CHECK (priority >= 0),
    is_active       boolean NOT NULL,
    created_at      timestamptz NOT NULL,
    updated_at      timestamptz NOT NULL
);

CREATE TABLE announcements (
    id                uuid PRIMARY KEY,
    name              varchar(100) NOT NULL,
    description       text,
    announcement_type varchar(20) NOT NULL CHECK (announcement_type IN
                          ('greeting', 'hold', 'ivr', 'closed', 'recording_notice', 'custom')),
    is_active         boolean NOT NULL,
    folder_id         uuid,
    audio_file_url    text,
    tts_text          text,
    duration_sec      int,
    language          varchar(10) NOT NULL DEFAULT 'ja',
    version           int NOT NULL,
    created_at        timestamptz NOT NULL,
    updated_at        timestamptz NOT NULL,
    CHECK (audio_file_url IS NOT NULL OR tts_text IS NOT NULL)
);

CREATE TABLE ivr_flows (
    id          uuid PRIMARY KEY,
    name        varchar(100) NOT NULL,
    description text,
    is_active   boolean NOT NULL,
    created_at  timestamptz NOT NULL,
    updated_at  timestamptz NOT NULL
);

CREATE TABLE ivr_nodes (
    id             uuid PRIMARY KEY,
    flow_id        uuid NOT NULL REFERENCES ivr_flows ON DELETE CASCADE,
    parent_id      uuid REFERENCES ivr_nodes ON DELETE CASCADE,
    node_type      varchar(10) NOT NULL CHECK (node_type IN
                       ('ANNOUNCE', 'KEYPAD', 'FORWARD', 'TRANSFER', 'RECORD', 'EXIT')),
    action_code    varchar(2),
    audio_file_url text,
    tts_text       text,
    timeout_sec    int NOT NULL DEFAULT 10,
    max_retries    int NOT NULL DEFAULT 3,
    depth          smallint NOT NULL CHECK (depth BETWEEN 0 AND 3),
    exit_action    varchar(2) DEFAULT 'IE',
    created_at     timestamptz NOT NULL,
    updated_at     timestamptz NOT NULL
);

CREATE TABLE ivr_transitions (
    id           uuid PRIMARY KEY,
    from_node_id uuid NOT NULL REFERENCES ivr_nodes ON DELETE CASCADE,
    input_type   varchar(10) NOT NULL CHECK (input_type IN
                     ('DTMF', 'TIMEOUT', 'INVALID', 'COMPLETE')),
    dtmf_key     varchar(5) CHECK (input_type <> 'DTMF' OR dtmf_key IS NOT NULL),
    to_node_id   uuid NOT NULL REFERENCES ivr_nodes ON DELETE CASCADE,
    created_at   timestamptz NOT NULL
);
