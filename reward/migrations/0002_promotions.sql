-- A person may put a reward model in use that the gate refused, or an earlier one; the reason is kept.
alter table reward_models add column promoted_at timestamptz;
alter table reward_models add column promoted_reason text;

create view reward_model_in_use as
    select * from reward_models
    where released or promoted_at is not null
    order by coalesce(promoted_at, created_at) desc
    limit 1;
