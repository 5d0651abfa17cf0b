//go:build e2e

package e2etest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/qemu/e2e/history"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// writePeriod is the load: enough that there is always a write in progress,
	// and little enough for two cores that run three control planes.
	writePeriod = 25 * time.Millisecond

	// writeWait is how long a write may take. A write that was lost with a leader fails
	// only after seven seconds, when other writes have succeeded for a long time. So it is
	// not scaled.
	writeWait = 2 * time.Second

	etcdPrefix = "/e2e/"
	configMaps = "/api/v1/namespaces/default/configmaps"
	mapPrefix  = "written-"
)

// A Store is where a test writes and reads, under keys of its own.
type Store struct {
	Name  string
	Every time.Duration // between two writes; 0: writePeriod
	Write func(ctx context.Context, key, value string) error
	Read  func(ctx context.Context) (map[string]string, error)
}

// EtcdStore writes through one member, and through the next one if that fails.
func EtcdStore(members ...*clientv3.Client) Store {
	turn := 0
	return Store{
		Name: "etcd",
		Write: func(ctx context.Context, key, value string) error {
			_, err := members[turn%len(members)].Put(ctx, etcdPrefix+key, value)
			if err != nil {
				turn++
			}
			return err
		},
		Read: func(ctx context.Context) (map[string]string, error) { return etcdKeys(ctx, members[0]) },
	}
}

// etcdKeys are the keys that were written; options choose the member that answers, and how.
func etcdKeys(ctx context.Context, client *clientv3.Client, options ...clientv3.OpOption) (map[string]string, error) {
	got, err := client.Get(ctx, etcdPrefix, append(options, clientv3.WithPrefix())...)
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	for _, kv := range got.Kvs {
		found[strings.TrimPrefix(string(kv.Key), etcdPrefix)] = string(kv.Value)
	}
	return found, nil
}

// EtcdCopy reads the data of one member, without a request to the others.
func EtcdCopy(client *clientv3.Client) func(context.Context) (map[string]string, error) {
	return func(ctx context.Context) (map[string]string, error) {
		return etcdKeys(ctx, client, clientv3.WithSerializable())
	}
}

// KubernetesStore writes config maps through an API server.
func KubernetesStore(s *Server) Store {
	return Store{
		Name: "Kubernetes",
		Write: func(ctx context.Context, key, value string) error {
			body := fmt.Sprintf(`{"metadata":{"name":%q},"data":{"value":%q}}`, mapPrefix+key, value)
			_, err := s.do(ctx, http.MethodPost, configMaps, body, http.StatusCreated)
			return err
		},
		Read: func(ctx context.Context) (map[string]string, error) {
			all, err := s.Objects(ctx, configMaps)
			found := map[string]string{}
			for name, o := range all {
				if key, ours := strings.CutPrefix(name, "default/"+mapPrefix); ours {
					found[key] = o.Data["value"]
				}
			}
			return found, err
		},
	}
}

// A Writer writes until it is stopped, or its test ends.
type Writer struct {
	*history.History
	Store
	c    *Cluster
	stop func()
}

// Write starts to write to a store, one key after the other. A write without an answer in
// time is not repeated: whether it was executed is unknown.
func (c *Cluster) Write(to Store) *Writer {
	ctx, cancel := context.WithCancel(c.t.Context())
	w := &Writer{History: history.New(time.Now()), Store: to, c: c}
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(cmp.Or(to.Every, writePeriod))
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			w.write(ctx, fmt.Sprintf("%06d", i))
		}
	})
	w.stop = func() {
		cancel()
		done.Wait()
	}
	c.t.Cleanup(w.stop)
	return w
}

func (w *Writer) write(ctx context.Context, key string) {
	one, cancel := context.WithTimeout(ctx, writeWait)
	defer cancel()
	value := "value of " + key
	switch err := w.Store.Write(one, key, value); {
	case err == nil:
		w.Acknowledged(key, value, time.Now())
	case ctx.Err() == nil: // otherwise it has ended
		w.Failed(err, time.Now())
	}
}

// Goes waits until further writes are acknowledged, and prints the longest time without an
// acknowledged write.
func (w *Writer) Goes(budget time.Duration, why string) {
	w.c.t.Helper()
	const more = 15 // a single one may have been in progress before
	want := w.Count() + more
	w.c.Eventually(budget, w.Name+" takes writes "+why, func() error {
		if n := w.Count(); n < want {
			return fmt.Errorf("%d more; %s", n+more-want, w)
		}
		return nil
	})
	w.c.t.Logf("%s: at most %.1fs without an acknowledged write %s; %s", w.Name, w.Longest().Took.Seconds(), why, w)
}

// In is the writer for a subtest.
func (w *Writer) In(c *Cluster) *Writer {
	part := *w
	part.c = c
	return &part
}

// Stop ends the writing.
func (w *Writer) Stop() { w.stop() }

// missed tests the check itself: a write that was never made must be reported as lost.
func missed(found map[string]string) error {
	twin := history.New(time.Now())
	twin.Acknowledged("never-written", "", time.Now())
	if twin.Check(found) == nil {
		return errors.New("a write that never was is found as well")
	}
	return nil
}

// Complete waits until all readers find each acknowledged write.
func (w *Writer) Complete(budget time.Duration, readers map[string]func(context.Context) (map[string]string, error)) {
	w.c.t.Helper()
	for who, read := range readers {
		w.c.Eventually(budget, who+" has every acknowledged write to "+w.Name, func() error {
			ctx, cancel := context.WithTimeout(w.c.t.Context(), eventually.Scale(askBudget))
			defer cancel()
			found, err := read(ctx)
			return errors.Join(err, w.Check(found), missed(found))
		})
	}
	w.c.t.Logf("%s: %d of %d acknowledged writes are there, for each of %d readers", w.Name, w.Count(), w.Count(), len(readers))
}
