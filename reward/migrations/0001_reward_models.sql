-- Every reward model that was trained, with its gate's verdict; the newest released one is in use.
create table reward_models (
    reward_model_id text primary key,
    snapshot_id text not null,
    path text not null,
    digest text not null,
    manifest jsonb not null,
    report jsonb not null,
    released boolean not null,
    created_at timestamptz not null default now()
);
