//! Which rows an operation is about.

use owed_core::{DeliveryId, DeliveryQuery, EventId, EventQuery, Status, Store, Timestamp};
use uuid::Uuid;

use crate::{Error, declare::DEFAULT_LANE, outbox::Outbox};

/// Which events: those that match everything that is said.
///
/// ```
/// # use owed::{EventFilter, EventId};
/// let of_one_name = EventFilter::named("shop.OrderPlaced");
/// let two = EventFilter::ids([EventId(7), EventId(9)]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct EventFilter(pub(crate) EventQuery);

impl EventFilter {
    /// Every event. Narrow it, or mean it.
    pub fn all() -> Self {
        EventFilter(EventQuery::default())
    }

    /// These events. An empty list is no event.
    pub fn ids(ids: impl IntoIterator<Item = EventId>) -> Self {
        EventFilter(EventQuery { ids: Some(ids.into_iter().collect()), ..EventQuery::default() })
    }

    /// Events of this name.
    pub fn named(name: impl Into<String>) -> Self {
        EventFilter(EventQuery { name: Some(name.into()), ..EventQuery::default() })
    }

    /// Everything that one request led to.
    pub fn correlated(id: Uuid) -> Self {
        EventFilter(EventQuery { correlation_id: Some(id), ..EventQuery::default() })
    }

    /// And only those of this name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.0.name = Some(name.into());
        self
    }

    /// And only those recorded at this time or later.
    pub fn recorded_from(mut self, from: Timestamp) -> Self {
        self.0.recorded_from = Some(from);
        self
    }

    /// And only those recorded before this time.
    pub fn recorded_until(mut self, until: Timestamp) -> Self {
        self.0.recorded_until = Some(until);
        self
    }
}

/// Which deliveries: those that match everything that is said.
///
/// ```
/// # use owed::{DeliveryFilter, EventFilter};
/// let refused = DeliveryFilter::receiver("shop.receipt").error("mailbox full");
/// let of_today = DeliveryFilter::of(EventFilter::named("shop.OrderPlaced"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct DeliveryFilter {
    query: DeliveryQuery,
    lane: Option<String>,
}

impl DeliveryFilter {
    fn new(query: DeliveryQuery) -> Self {
        DeliveryFilter { query, lane: None }
    }

    /// Every delivery. Narrow it, or mean it.
    pub fn all() -> Self {
        Self::new(DeliveryQuery::default())
    }

    /// These deliveries. An empty list is no delivery.
    pub fn ids(ids: impl IntoIterator<Item = DeliveryId>) -> Self {
        Self::new(DeliveryQuery { ids: Some(ids.into_iter().collect()), ..DeliveryQuery::default() })
    }

    /// The deliveries of these events.
    pub fn of(events: EventFilter) -> Self {
        Self::new(DeliveryQuery { of: events.0, ..DeliveryQuery::default() })
    }

    /// The deliveries of one receiver.
    pub fn receiver(key: impl Into<String>) -> Self {
        Self::all().to([key])
    }

    /// The deliveries of the receivers of a lane, as they are declared now. The default lane is all that no named lane
    /// takes, deleted receivers' included.
    pub fn lane(name: impl Into<String>) -> Self {
        DeliveryFilter { lane: Some(name.into()), ..Self::all() }
    }

    /// And only those to these receivers. An empty list is none.
    pub fn to<K: Into<String>>(mut self, receivers: impl IntoIterator<Item = K>) -> Self {
        self.query.receivers = Some(receivers.into_iter().map(Into::into).collect());
        self
    }

    /// And only those of these rows: a list of ids can't reach beyond what else is said.
    pub fn rows(mut self, ids: impl IntoIterator<Item = DeliveryId>) -> Self {
        self.query.ids = Some(ids.into_iter().collect());
        self
    }

    /// And only those to this target of a fan-out.
    pub fn target(mut self, target: impl Into<String>) -> Self {
        self.query.target = Some(target.into());
        self
    }

    /// And only those whose last error holds this text, letter for letter.
    pub fn error(mut self, text: impl Into<String>) -> Self {
        self.query.error = Some(text.into());
        self
    }

    /// The query for those of them in one of `statuses`.
    pub(crate) fn query<S: Store>(
        &self,
        outbox: &Outbox<S>,
        statuses: &[Status],
    ) -> Result<DeliveryQuery, Error> {
        let mut query = DeliveryQuery { statuses: statuses.to_vec(), ..self.query.clone() };
        let Some(lane) = &self.lane else { return Ok(query) };
        let registry = outbox.registry();
        let Some(here) = registry.lane(lane) else {
            let lanes = registry.lanes().map(|lane| &**lane).collect::<Vec<_>>().join(", ");
            return Err(Error::NoLane { lane: lane.clone(), lanes });
        };
        if lane == DEFAULT_LANE {
            let named = registry.lanes().filter(|name| &***name != DEFAULT_LANE);
            let elsewhere = named.filter_map(|name| registry.lane(name)).flatten();
            query.receivers_except.extend(elsewhere.map(|receiver| receiver.key.to_string()));
        } else {
            let chosen = query.receivers.take();
            let here = here.iter().map(|receiver| receiver.key.to_string());
            query.receivers =
                Some(here.filter(|key| chosen.as_ref().is_none_or(|keys| keys.contains(key))).collect());
        }
        Ok(query)
    }
}
