-- Records that the platform itself has to say, written in the transaction that makes them true; the ingest publishes
-- them (feedback/publishing.py). Headers: [[name, base64 of the value], …]; a null value is a tombstone.
create table outgoing_records (
    record_id bigint generated always as identity primary key,
    topic text not null,
    key text not null,
    value text,
    headers jsonb not null,
    created_at timestamptz not null default now(),
    published_log_id text                    -- the log that has it
);
create index outgoing_records_to_publish on outgoing_records (record_id) where published_log_id is null;
