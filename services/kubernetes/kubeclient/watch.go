package kubeclient

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"time"
)

// EventType says what a watch saw. There are others, such as bookmarks, which only carry a resource version.
type EventType string

const (
	Added    EventType = "ADDED"
	Modified EventType = "MODIFIED"
	Deleted  EventType = "DELETED"
)

// Event is one change that a watch saw.
type Event struct {
	Type   EventType `json:"type"`
	Object Object    `json:"object"`
}

// watchSlack is what a watch may take over its time before the client hangs up:
// a server that lost power never ends the stream.
const watchSlack = 10 * time.Second

// Watch calls each for every change after resourceVersion, until each returns an
// error, or for at most the given time: then it returns nil, and the caller goes on
// from the last object's ResourceVersion. IsGone(err) asks for a new List.
func (c *Client) Watch(ctx context.Context, r Ref, s Selection, resourceVersion string, limit time.Duration, each func(Event) error) error {
	m, err := c.mappingOf(ctx, r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, limit+watchSlack)
	defer cancel()
	query := s.query()
	query.Set("watch", "true")
	query.Set("allowWatchBookmarks", "true")
	query.Set("resourceVersion", resourceVersion)
	query.Set("timeoutSeconds", strconv.Itoa(int(math.Ceil(limit.Seconds()))))
	body, err := c.open(ctx, request{method: http.MethodGet, path: m.path(r.Namespace, r.Name), query: query})
	if err != nil {
		return fmt.Errorf("watch %s: %w", r, err)
	}
	defer body.Close()
	stream := json.NewDecoder(body)
	for {
		var event Event
		err := stream.Decode(&event)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("watch %s: %w", r, err)
		}
		if event.Type == "ERROR" {
			return fmt.Errorf("watch %s: %w", r, watchError(event.Object))
		}
		if err := each(event); err != nil {
			return err
		}
	}
}

// watchError is a Status that came in a stream: its HTTP code is inside.
func watchError(o Object) error {
	code, _ := o["code"].(float64)
	raw, err := json.Marshal(o)
	if err != nil {
		return err
	}
	return statusError(int(code), raw)
}
