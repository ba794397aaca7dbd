-- The ledger: every event once, in the columns that feedback/events.py declares (same names; a test compares).
-- Tables are append-only; what is current or derived is a view.

create table interactions (
    event_id text primary key,
    "time" timestamptz not null,
    api_key_id text not null,
    response_id text not null unique,
    endpoint text not null,
    checkpoint_id text not null,
    alias text,
    pinned boolean not null,
    experiment_id text,
    unit text,
    propensity double precision,
    comparison_id text,
    position smallint,
    "user" text,
    session_id text,
    tags jsonb not null,
    content_kept boolean not null,
    prompt_hash text not null,
    messages jsonb,
    parameters jsonb not null,
    text text,
    finish_reason text,
    status text not null,
    error text,
    prompt_tokens bigint,
    completion_tokens bigint,
    time_to_first_token_s double precision,
    duration_s double precision not null,
    overhead_s double precision,
    traceparent text,
    ingested_at timestamptz not null default now()
);
create index interactions_by_comparison on interactions (comparison_id) where comparison_id is not null;
create index interactions_by_experiment on interactions (experiment_id, checkpoint_id) where experiment_id is not null;
create index interactions_by_ingestion on interactions (ingested_at);

-- One table for all kinds: columns that a kind does not have are null.
create table feedback (
    event_id text primary key,
    "time" timestamptz not null,
    api_key_id text not null,
    kind text not null,
    rater text not null,
    source text not null,
    tags jsonb not null,
    response_id text,
    comparison_id text,
    value text,
    verdict text,
    chosen text,
    target text not null generated always as (coalesce(response_id, comparison_id)) stored,
    ingested_at timestamptz not null default now()
);
create index feedback_by_current_vote on feedback (target, kind, rater, "time" desc, event_id desc);
create index feedback_by_ingestion on feedback (ingested_at);

-- Records that could not be read or stored, with everything they were. Headers: [[name, base64 of the value], …].
create table dead_letters (
    dead_letter_id bigint generated always as identity primary key,
    topic text not null,
    partition integer not null,
    log_id text not null,
    "offset" bigint not null,
    event_id text,                           -- from the header ce_id, where there was one
    key bytea,
    value bytea,
    headers jsonb not null,
    error_class text not null,
    error_message text not null,
    created_at timestamptz not null default now(),
    unique (topic, partition, log_id, "offset")
);
create index dead_letters_by_event on dead_letters (event_id) where event_id is not null;

-- How far each log has been read: the truth about it. Moved by compare-and-set together with the rows.
create table ingest_offsets (
    topic text not null,
    partition integer not null,
    log_id text not null,
    next_offset bigint not null,
    updated_at timestamptz not null default now(),
    primary key (topic, partition, log_id)
);

create table snapshots (
    snapshot_id text primary key,
    path text not null,
    digest text not null,
    manifest jsonb not null,
    created_at timestamptz not null default now()
);

-- A changed mind is a revision: the latest vote of a rater on a target, by (time, event id), is the current one.
create view current_votes as
select distinct on (target, kind, rater) *
from feedback
order by target, kind, rater, "time" desc, event_id desc;

-- Current preference votes whose two answers have both arrived. a and b are the answers shown at positions 0 and 1.
-- A vote that chooses a response of another comparison joins nothing and is not listed (the audit counts it).
create view comparison_votes as
select
    vote.event_id as vote_id,
    vote.comparison_id,
    a.experiment_id,
    vote.rater,
    vote.source,
    vote.verdict,
    a.prompt_hash,
    a.response_id as response_a,
    b.response_id as response_b,
    case vote.chosen when a.response_id then a.response_id when b.response_id then b.response_id end
        as chosen_response_id,
    case vote.chosen when a.response_id then b.response_id when b.response_id then a.response_id end
        as rejected_response_id,
    case vote.chosen when a.response_id then a.checkpoint_id when b.response_id then b.checkpoint_id end
        as chosen_checkpoint_id,
    case vote.chosen when a.response_id then b.checkpoint_id when b.response_id then a.checkpoint_id end
        as rejected_checkpoint_id,
    a.checkpoint_id as checkpoint_a,
    b.checkpoint_id as checkpoint_b,
    vote."time" as voted_at
from current_votes vote
join interactions a on a.comparison_id = vote.comparison_id and a.position = 0
join interactions b on b.comparison_id = vote.comparison_id and b.position = 1
where vote.kind = 'preference'
  and (vote.chosen is null or vote.chosen in (a.response_id, b.response_id));

-- What people prefer, as pairs of two different kept texts, each with where it comes from.
--   stated:  a choice in a comparison, or a tie (then `chosen` is merely the one at position 0). "Both bad" says
--            nothing about the order and makes no pair.
--   thumbs:  within one prompt, an answer with more ups than downs beats one with more downs than ups. They are
--            paired rank by rank (most votes first), so a popular prompt gives as many pairs as it has such
--            answers, and not their product. `rater` gave the up; `other_rater` gave the down.
-- weight, in (0, 1]: no rater counts for more than 10 % of all pairs, or than an even share where there are fewer
-- than ten raters: min(1, max(0.1, 1 / raters) * pairs / pairs of that rater); of the two raters' weights the lower.
create view derived_preferences as
with answers as (
    select response_id, prompt_hash, messages, text
    from interactions
    where content_kept and messages is not null and text is not null
),
thumbed as (
    select
        answer.response_id,
        answer.prompt_hash,
        sum(case vote.value when 'up' then 1 else -1 end) as net,
        (array_agg(vote.rater order by vote."time", vote.event_id) filter (where vote.value = 'up'))[1] as upper,
        (array_agg(vote.rater order by vote."time", vote.event_id) filter (where vote.value = 'down'))[1] as downer,
        min(vote.source) as source
    from current_votes vote
    join answers answer on answer.response_id = vote.response_id
    where vote.kind = 'thumb'
    group by answer.response_id, answer.prompt_hash
),
ranked as (
    select *, row_number() over (partition by prompt_hash, sign(net) order by abs(net) desc, response_id) as place
    from thumbed
    where net <> 0
),
pairs as (
    select
        vote_id as preference_id,
        coalesce(chosen_response_id, response_a) as chosen_response_id,
        coalesce(rejected_response_id, response_b) as rejected_response_id,
        verdict = 'tie' as tie,
        rater,
        rater as other_rater,
        source,
        'stated' as kind
    from comparison_votes
    where verdict in ('chosen', 'tie')
    union all
    select
        up.response_id || ':' || down.response_id,
        up.response_id,
        down.response_id,
        false,
        up.upper,
        down.downer,
        up.source,
        'thumbs'
    from ranked up
    join ranked down on down.prompt_hash = up.prompt_hash and down.place = up.place and down.net < 0
    where up.net > 0
),
usable as (
    select
        pairs.*,
        chosen.prompt_hash,
        chosen.messages,
        chosen.text as chosen_text,
        rejected.text as rejected_text
    from pairs
    join answers chosen on chosen.response_id = pairs.chosen_response_id
    join answers rejected on rejected.response_id = pairs.rejected_response_id
    where chosen.text <> rejected.text
),
heard as (
    select rater, count(*) as pairs
    from (
        select preference_id, rater from usable
        union
        select preference_id, other_rater from usable
    ) as spoken
    group by rater
),
capped as (
    select
        rater,
        least(1.0, greatest(0.1, 1.0 / (select count(*) from heard)) * (select count(*) from usable) / pairs) as weight
    from heard
)
select
    usable.preference_id,
    usable.prompt_hash,
    usable.messages,
    usable.chosen_text,
    usable.rejected_text,
    usable.chosen_response_id,
    usable.rejected_response_id,
    least(mine.weight, other.weight)::double precision as weight,
    usable.tie,
    usable.rater,
    usable.other_rater,
    usable.source,
    usable.kind
from usable
join capped mine on mine.rater = usable.rater
join capped other on other.rater = usable.other_rater;
