//! The trace of the code that fires, and a delivery's link back to it. Works with the feature `otel`, through
//! `tracing-opentelemetry`; without it, scopes carry what they are given.

use tracing::Span;

/// The current span as a W3C trace context.
#[cfg(feature = "otel")]
pub(crate) fn current() -> Option<String> {
    use opentelemetry::trace::TraceContextExt;
    use tracing_opentelemetry::OpenTelemetrySpanExt;

    let context = Span::current().context();
    let span = context.span();
    let span = span.span_context();
    span.is_valid()
        .then(|| format!("00-{}-{}-{:02x}", span.trace_id(), span.span_id(), span.trace_flags().to_u8()))
}

#[cfg(not(feature = "otel"))]
pub(crate) fn current() -> Option<String> {
    None
}

/// Links a delivery's span to the span that its event was fired in. Not as its child: that one has long ended.
#[cfg(feature = "otel")]
pub(crate) fn link(span: &Span, traceparent: &str) {
    use opentelemetry::trace::{SpanContext, TraceFlags, TraceState};
    use tracing_opentelemetry::OpenTelemetrySpanExt;

    let mut parts = traceparent.split('-').skip(1);
    let mut hex = || parts.next().and_then(|part| u128::from_str_radix(part, 16).ok());
    // A row that was damaged by hand has no link.
    if let (Some(trace), Some(parent), Some(flags)) = (hex(), hex(), hex())
        && let (Ok(parent), Ok(flags)) = (u64::try_from(parent), u8::try_from(flags))
    {
        let flags = TraceFlags::new(flags);
        span.add_link(SpanContext::new(trace.into(), parent.into(), flags, true, TraceState::NONE));
    }
}

#[cfg(not(feature = "otel"))]
pub(crate) fn link(_: &Span, _: &str) {}
