-- API keys, checkpoints, the aliases that people use, what each engine replica has proven, and experiments.

create table api_keys (
    key_id text primary key,
    name text not null,
    sha256 text not null unique,          -- of the secret; the secret itself is shown once and not kept
    scopes text[] not null,
    created_at timestamptz not null default now(),
    revoked_at timestamptz
);

create table checkpoints (
    checkpoint_id text primary key,
    kind text not null check (kind in ('model', 'adapter')),
    parent_id text references checkpoints,   -- null for a base
    digest text not null,
    path text not null,
    manifest jsonb not null,
    state text not null default 'active' check (state in ('active', 'retired')),
    created_at timestamptz not null default now()
);

-- One row for each (checkpoint, engine replica): loaded and proven, or refused, with the canary report.
create table checkpoint_replicas (
    checkpoint_id text not null references checkpoints,
    replica_id text not null,
    status text not null check (status in ('proven', 'refused')),
    proof jsonb not null,
    proven_at timestamptz not null default now(),
    primary key (checkpoint_id, replica_id)
);

create table engine_replicas (
    replica_id text primary key,
    base_checkpoint_id text not null references checkpoints,
    heartbeat_at timestamptz not null default now()
);

create table aliases (
    alias text primary key,
    checkpoint_id text not null references checkpoints,
    updated_at timestamptz not null default now()
);

create table alias_moves (
    move_id bigint generated always as identity primary key,
    alias text not null,
    from_checkpoint_id text references checkpoints,
    to_checkpoint_id text not null references checkpoints,
    reason text not null,
    moved_at timestamptz not null default now()
);

create table experiments (
    experiment_id text primary key,
    alias text not null,
    salt text not null,
    control_id text not null references checkpoints,
    candidate_id text not null references checkpoints,
    candidate_weight double precision not null check (candidate_weight >= 0 and candidate_weight <= 1),
    state text not null default 'running' check (state in ('running', 'promoted', 'rejected', 'stopped')),
    report jsonb,
    started_at timestamptz not null default now(),
    stopped_at timestamptz
);
create unique index one_running_experiment_per_alias on experiments (alias) where state = 'running';
