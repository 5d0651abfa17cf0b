package controlplane

import (
	"bytes"
	"errors"
	"maps"
	"net/http"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// The control plane's certificates are renewed while it runs: files change,
// pods don't. For a new authority, the pods are started again.
func TestRenewalLeavesPodsAlone(t *testing.T) {
	began := time.Now()
	var later atomic.Int64
	c := testConfig(t)
	f := &fixture{t: t, dir: t.TempDir(), config: c, store: testStore(t, c), logs: logs.New(testWriter{t}), kubelet: &kubelet{code: http.StatusOK}, kubeletURL: "https://127.0.0.1:1"}
	f.now = func() time.Time { return began.Add(time.Duration(later.Load())) }
	f.run()
	f.etcd(true)
	pods := map[string][]byte{}
	eventually.That(t, patience, "static pods", func() (err error) {
		for _, program := range Programs {
			if pods[program], err = os.ReadFile(f.file(program)); err != nil {
				return err
			}
		}
		return nil
	})
	certificate := f.path("secrets", "kubernetes", apiServer, "apiserver.crt")
	first, err := os.ReadFile(certificate)
	put(t, err)

	later.Store(int64(pki.LeafValidity - pki.RenewBefore + time.Hour))
	put(t, clock.Statuses.Put(f.store.As("test"), "node", clock.Status{Synced: true}))
	eventually.That(t, patience, "the apiserver's certificate to be renewed", func() error {
		data, err := os.ReadFile(certificate)
		if err == nil && bytes.Equal(data, first) {
			err = errors.New("still the first one")
		}
		return err
	})
	// A later change arrives after any change that the renewal would have caused.
	image := c.Cluster.Scheduler.Image + "-next"
	f.configure(func(c *config.Config) { c.Cluster.Scheduler.Image = image })
	eventually.That(t, patience, "the scheduler's new image", func() error {
		data, err := os.ReadFile(f.file(scheduler))
		if err == nil && !bytes.Contains(data, []byte(image)) {
			err = errors.New("still the old one")
		}
		return err
	})
	for _, program := range slices.Sorted(maps.Keys(pods)) {
		data, err := os.ReadFile(f.file(program))
		put(t, err)
		if program != scheduler {
			if diff := cmp.Diff(string(pods[program]), string(data)); diff != "" {
				t.Errorf("%s changed with a renewed certificate:\n%s", program, diff)
			}
		}
	}

	next := authority(t, pki.NewKubernetesCA)
	f.configure(func(c *config.Config) { c.Cluster.CA = next })
	eventually.That(t, patience, "pods that are started anew for the new authority", func() error {
		for program, before := range pods {
			if data, err := os.ReadFile(f.file(program)); err != nil || bytes.Equal(data, before) {
				return errors.Join(err, errors.New(program+" is as before"))
			}
		}
		return nil
	})
}
