-- What a key may use, all gateways together; null: as much as there is.
alter table api_keys
    add column requests_per_minute integer check (requests_per_minute > 0),
    add column tokens_per_minute integer check (tokens_per_minute > 0),
    add column concurrency integer check (concurrency > 0);

-- The model under each checkpoint: itself, or the one that its parents lead to. Its engines serve it.
alter table checkpoints add column base_id text references checkpoints;
with recursive bases as (
    select checkpoint_id, checkpoint_id as base_id from checkpoints where kind = 'model'
    union all
    select child.checkpoint_id, bases.base_id
    from checkpoints child join bases on child.parent_id = bases.checkpoint_id and child.kind = 'adapter'
)
update checkpoints set base_id = bases.base_id from bases where bases.checkpoint_id = checkpoints.checkpoint_id;
alter table checkpoints alter column base_id set not null;
