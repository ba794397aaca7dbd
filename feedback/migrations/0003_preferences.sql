-- What people prefer, kept up to date: a new vote costs the work of its prompt, not of the table.
-- `pairs_of` says what the votes on some prompts amount to; `refresh_preferences` makes `preferences` say the same.

-- The pairs of two different kept texts that the current votes on these prompts give, each with where it comes from.
--   stated:      a choice between two answers to one prompt, in a comparison or named by the vote; or a tie (then
--                `chosen` is merely the first). "Both bad" says nothing about the order and makes no pair.
--   correction:  the text that it should have been beats the answer; `vote_id` has the text, no response is chosen.
--   thumbs:      within one prompt, an answer with more ups than downs beats one with more downs than ups. They are
--                paired rank by rank (most votes first), so a popular prompt gives as many pairs as it has such
--                answers, and not their product. `rater` gave the up; `other_rater` gave the down.
--
-- Every step is a hash or an index, linear in the prompts' answers: a prompt may be very popular, and the planner, which
-- can't know how much a step gives, would compare all with all.
create function pairs_of(prompts text[]) returns table (
    preference_id text,
    prompt_hash text,
    kind text,
    tie boolean,
    chosen_response_id text,
    rejected_response_id text,
    vote_id text,
    rater text,
    other_rater text,
    source text
) language sql stable set enable_nestloop = off as $$
with answers as materialized (
    select i.response_id, i.comparison_id, i.position, i.prompt_hash, i.text
    from interactions i
    where i.prompt_hash = any (prompts) and i.content_kept and i.messages is not null and i.text is not null
),
votes as materialized (
    select current.*, answer.prompt_hash, answer.text as answer_text
    from answers answer
    cross join lateral (
        select distinct on (f.subject, f.rater) f.*
        from feedback f
        where f.target = answer.response_id
        order by f.subject, f.rater, f."time" desc, f.event_id desc
    ) as current
),
asked as (
    select a.response_id as a, b.response_id as b, a.text as text_a, b.text as text_b, a.prompt_hash, current.*
    from answers a
    join answers b on b.comparison_id = a.comparison_id and b.position = 1
    cross join lateral (
        select distinct on (f.rater) f.event_id, f.verdict, f.chosen, f.rater, f.source
        from feedback f
        where f.target = a.comparison_id and f.subject = 'preference'
        order by f.rater, f."time" desc, f.event_id desc
    ) as current
    where a.position = 0
),
named as (
    select distinct on (f.target, f.rater)
        a.response_id as a, b.response_id as b, a.text as text_a, b.text as text_b, a.prompt_hash,
        f.event_id, f.verdict, f.chosen, f.rater, f.source
    from answers a
    cross join lateral (
        select * from feedback vote where vote.responses ->> 0 = a.response_id and vote.kind = 'preference'
    ) as f
    join answers b on b.response_id = f.responses ->> 1 and b.prompt_hash = a.prompt_hash
    order by f.target, f.rater, f."time" desc, f.event_id desc
),
thumbed as (
    select
        vote.response_id,
        vote.prompt_hash,
        vote.answer_text,
        sum(case vote.value when 'up' then 1 else -1 end) as net,
        (array_agg(vote.rater order by vote."time", vote.event_id) filter (where vote.value = 'up'))[1] as upper,
        (array_agg(vote.rater order by vote."time", vote.event_id) filter (where vote.value = 'down'))[1] as downer,
        min(vote.source) as source
    from votes vote
    where vote.subject = 'thumb'
    group by vote.response_id, vote.prompt_hash, vote.answer_text
),
ranked as (
    select
        thumbed.*,
        row_number() over (
            partition by thumbed.prompt_hash, sign(net) order by abs(net) desc, thumbed.response_id collate "C"
        ) as place
    from thumbed
    where net <> 0
),
paired as (
    select
        ranked.prompt_hash,
        max(ranked.response_id) filter (where net > 0) as up,
        max(ranked.response_id) filter (where net < 0) as down,
        max(ranked.answer_text) filter (where net > 0) as up_text,
        max(ranked.answer_text) filter (where net < 0) as down_text,
        max(ranked.upper) filter (where net > 0) as upper,
        max(ranked.downer) filter (where net < 0) as downer,
        max(ranked.source) filter (where net > 0) as source
    from ranked
    group by ranked.prompt_hash, ranked.place
    having count(*) = 2                      -- at each place one is up and one is down, or there is no pair
)
select
    stated.event_id,
    stated.prompt_hash,
    'stated',
    stated.verdict = 'tie',
    coalesce(stated.chosen, stated.a),
    case stated.chosen when stated.b then stated.a else stated.b end,
    stated.event_id,
    stated.rater,
    stated.rater,
    stated.source
from (select * from asked union all select * from named) as stated
where stated.verdict in ('chosen', 'tie')
  and (stated.chosen is null or stated.chosen in (stated.a, stated.b))
  and stated.text_a <> stated.text_b
union all
select
    vote.event_id,
    vote.prompt_hash,
    'correction',
    false,
    null,
    vote.response_id,
    vote.event_id,
    vote.rater,
    vote.rater,
    vote.source
from votes vote
where vote.subject = 'correction' and vote.text <> vote.answer_text
union all
select
    up || ':' || down,
    prompt_hash,
    'thumbs',
    false,
    up,
    down,
    null,
    upper,
    downer,
    source
from paired
where up_text <> down_text
$$;

-- One row for each pair that ever was. `revision` counts its changes; `retracted` says that the votes have moved on.
create table preferences (
    preference_id text primary key,
    prompt_hash text not null,
    kind text not null,
    tie boolean not null,
    chosen_response_id text,
    rejected_response_id text not null,
    vote_id text,
    rater text not null,
    other_rater text not null,
    source text not null,
    revision integer not null default 1,
    retracted boolean not null default false,
    changed_at timestamptz not null default now(),
    published_log_id text                    -- the log that has this revision
);
create index preferences_by_prompt on preferences (prompt_hash);
create index preferences_to_publish on preferences (changed_at) where published_log_id is null;

-- Makes `preferences` say what the votes on these prompts say now; returns how many rows changed.
create function refresh_preferences(prompts text[]) returns bigint language sql as $$
with pairs as materialized (
    select * from pairs_of(prompts)
),
gone as (
    update preferences p
    set retracted = true, revision = p.revision + 1, changed_at = now(), published_log_id = null
    where p.prompt_hash = any (prompts)
      and not p.retracted
      and not exists (select from pairs where pairs.preference_id = p.preference_id)
    returning 1
),
told as (
    insert into preferences as p (
        preference_id, prompt_hash, kind, tie, chosen_response_id, rejected_response_id, vote_id,
        rater, other_rater, source
    )
    select * from (
        select
            preference_id, prompt_hash, kind, tie, chosen_response_id, rejected_response_id, vote_id,
            rater, other_rater, source
        from pairs
    ) as fresh
    on conflict (preference_id) do update set
        prompt_hash = excluded.prompt_hash,
        kind = excluded.kind,
        tie = excluded.tie,
        chosen_response_id = excluded.chosen_response_id,
        rejected_response_id = excluded.rejected_response_id,
        vote_id = excluded.vote_id,
        rater = excluded.rater,
        other_rater = excluded.other_rater,
        source = excluded.source,
        revision = p.revision + 1,
        retracted = false,
        changed_at = now(),
        published_log_id = null
    where (p.tie, p.chosen_response_id, p.rejected_response_id, p.rater, p.other_rater, p.source, p.retracted)
        is distinct from (
            excluded.tie, excluded.chosen_response_id, excluded.rejected_response_id,
            excluded.rater, excluded.other_rater, excluded.source, false
        )
    returning 1
)
select (select count(*) from gone) + (select count(*) from told)
$$;

-- The pairs with their texts and weights.
-- weight, in (0, 1]: no rater counts for more than 10 % of all pairs, or than an even share where there are fewer
-- than ten raters: min(1, max(0.1, 1 / raters) * pairs / pairs of that rater); of the two raters' weights the lower.
create view derived_preferences as
with usable as (
    select * from preferences where not retracted
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
    rejected.messages,
    coalesce(chosen.text, correction.text) as chosen_text,
    rejected.text as rejected_text,
    usable.chosen_response_id,
    usable.rejected_response_id,
    least(mine.weight, other.weight)::double precision as weight,
    usable.tie,
    usable.rater,
    usable.other_rater,
    usable.source,
    usable.kind
from usable
join interactions rejected on rejected.response_id = usable.rejected_response_id
left join interactions chosen on chosen.response_id = usable.chosen_response_id
left join feedback correction on correction.event_id = usable.vote_id and usable.kind = 'correction'
join capped mine on mine.rater = usable.rater
join capped other on other.rater = usable.other_rater;

-- What the votes that are there already say.
select refresh_preferences(array(select distinct prompt_hash from interactions));
