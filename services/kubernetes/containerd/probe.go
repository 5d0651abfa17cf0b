package containerd

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/distribution/reference"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
)

// probeTime is for each server, at the same time.
const probeTime = 3 * time.Second

// Registry is how one of the servers of a registry answers.
type Registry struct {
	Of     string // whose images it has
	URL    string // of its API
	Mirror bool   // it is one, and not the registry itself
	Err    error  // nil: it answers; whether the node may have images isn't asked
}

// Registries asks the registries of the node's images, and those that have mirrors.
func Registries(ctx context.Context, cfg *config.Config) []*Registry {
	names := maps.Collect(maps.All(cfg.Machine.Registries.Mirrors))
	delete(names, "*") // it stands for others
	for _, image := range cfg.Images() {
		if name, err := reference.ParseNormalizedNamed(image); err == nil {
			names[reference.Domain(name)] = config.Mirror{}
		}
	}
	return origin{hostsDir: hostsDir, bundle: boot.CABundle, machine: cfg.Machine}.probe(ctx, slices.Sorted(maps.Keys(names)))
}

// probe begins as a pull does: at each server of the registries, with the proxies and settings of TLS that pulls have.
func (o origin) probe(ctx context.Context, names []string) (all []*Registry) {
	hosts, done := o.hosts(ctx)
	defer done()
	var wg sync.WaitGroup
	for _, name := range names {
		servers, _ := hosts(name) // a pull says what is wrong with the settings
		usual, _ := docker.DefaultHost(name)
		for _, s := range servers {
			r := &Registry{Of: name, URL: s.Scheme + "://" + s.Host + s.Path + "/", Mirror: s.Host != usual}
			all = append(all, r)
			wg.Go(func() {
				// Theirs may be one for all. Where a registry sends the node isn't looked at: that is an answer.
				client := &http.Client{Transport: s.Client.Transport, Timeout: probeTime, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
				resp, err := client.Get(r.URL)
				if r.Err = err; err == nil && resp.Body.Close() == nil && resp.StatusCode >= http.StatusInternalServerError {
					r.Err = errors.New(r.URL + ": " + resp.Status)
				}
			})
		}
	}
	wg.Wait()
	return all
}
