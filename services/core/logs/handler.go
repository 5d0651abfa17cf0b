package logs

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// timeLayout of a log line, UTC.
const timeLayout = "2006/01/02 15:04:05"

// handler is the slog.Handler of one log.
type handler struct {
	logs   *Logs
	id     string
	group  string // prefix of keys: "a.b."
	attrs  string // rendered: " k=v k=v"
	notice bool   // Console was given to With
	quiet  bool   // nothing goes to the console
}

// Enabled drops debug lines: nobody reads them on an appliance, and making them
// costs.
func (h *handler) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }

func (h *handler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	c := *h
	c.group += name + "."
	return &c
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	c := *h
	var b strings.Builder
	for _, a := range attrs {
		if a.Key == consoleKey {
			c.notice = true
			continue
		}
		appendAttr(&b, h.group, a)
	}
	c.attrs += b.String()
	return &c
}

func (h *handler) Handle(_ context.Context, rec slog.Record) error {
	notice := h.notice || rec.Level >= LevelNotice
	var b strings.Builder
	b.WriteString(OneLine(rec.Message))
	b.WriteString(h.attrs)
	rec.Attrs(func(a slog.Attr) bool {
		if a.Key == consoleKey {
			notice = true
			return true
		}
		appendAttr(&b, h.group, a)
		return true
	})
	text := b.String()

	when := rec.Time
	if when.IsZero() {
		when = h.logs.now()
	}
	h.logs.add(h.id, when.UTC().Format(timeLayout)+"  "+levelPrefix(rec.Level)+text)
	if notice && !h.quiet {
		h.logs.console.write(max(rec.Level, LevelNotice), h.id+": "+text)
	}
	return nil
}

func appendAttr(b *strings.Builder, group string, a slog.Attr) {
	v := a.Value.Resolve()
	if v.Kind() == slog.KindGroup {
		if a.Key != "" {
			group += a.Key + "."
		}
		for _, member := range v.Group() {
			appendAttr(b, group, member)
		}
		return
	}
	if a.Equal(slog.Attr{}) {
		return
	}
	fmt.Fprintf(b, " %s%s=%s", group, a.Key, quoteIfNeeded(valueText(v)))
}

func valueText(v slog.Value) string {
	switch v.Kind() {
	case slog.KindDuration:
		// Nanoseconds of a duration are noise to a reader.
		return v.Duration().Round(time.Millisecond).String()
	case slog.KindTime:
		return v.Time().UTC().Format(time.RFC3339)
	case slog.KindAny:
		return fmt.Sprint(v.Any())
	}
	return v.String()
}

// quoteIfNeeded quotes what a reader could not tell from its surroundings.
func quoteIfNeeded(s string) string {
	odd := func(r rune) bool { return r <= ' ' || r == '"' || r == '=' || !unicode.IsPrint(r) }
	if s == "" || slices.ContainsFunc([]rune(s), odd) {
		return strconv.Quote(s)
	}
	return s
}

// OneLine keeps a message from becoming several lines of a log: joined errors
// have newlines.
func OneLine(s string) string {
	return strings.ReplaceAll(strings.TrimRight(s, "\n"), "\n", "; ")
}
