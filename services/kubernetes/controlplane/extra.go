package controlplane

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/outbound"
)

const (
	// fetchTimeout limits one download; maxManifest its size. The largest known
	// manifests, of operators with their definitions, are a few MB.
	fetchTimeout = time.Minute
	// fetchAgain is the pause after a failed download. It doesn't grow: the
	// manifest may be the pod network's, and the node waits for it.
	fetchAgain  = 10 * time.Second
	maxManifest = 32 << 20
)

// extraBootstrapManifests are the manifests from URLs: of a custom CNI, and extra ones.
var extraBootstrapManifests = BootstrapManifests.In("extras")

// ManifestUnavailable: a manifest of the configuration can't be downloaded or read.
const ManifestUnavailable reason.Code = "ManifestUnavailable"

// fetchExtras publishes them. Each is downloaded only once for each boot and change of the
// list, so that a change at the URL doesn't change the cluster.
func fetchExtras(ctx context.Context, v resource.View, c *config.Config) error {
	wanted := map[string]bool{}
	var problems []error
	for _, u := range extraURLs(&c.Cluster) {
		id := "05-" + u.Redacted()
		if u.RawQuery != "" { // which may be all that tells two of them apart
			id += fmt.Sprintf("#%x", sha256.Sum256([]byte(u.RawQuery)))[:9]
		}
		wanted[id] = true
		found, err := extraBootstrapManifests.Get(v, id)
		if err == nil && len(found.Spec.Problems) == 0 {
			continue
		}
		m, err := fetchManifest(ctx, c.Machine.Env, u)
		if err != nil { // what was there stays
			m = Manifest{Objects: found.Spec.Objects, Problems: []string{err.Error()}}
		}
		if err := extraBootstrapManifests.Put(v, id, m); err != nil {
			return err
		}
		if len(m.Problems) > 0 {
			problems = append(problems, fmt.Errorf("manifest %s: %s", u.Redacted(), strings.Join(m.Problems, "; ")))
		}
	}
	if err := prune(v, extraBootstrapManifests, wanted); err != nil {
		return err
	}
	if len(problems) > 0 {
		return resource.RetryIn(reason.With(ManifestUnavailable, errors.Join(problems...)), fetchAgain)
	}
	return nil
}

func extraURLs(c *config.Cluster) (urls []config.URL) {
	if c.Network.CNI.Name == config.CNICustom {
		urls = append(urls, c.Network.CNI.URLs...)
	}
	return append(urls, c.ExtraManifests...)
}

func fetchManifest(ctx context.Context, env map[string]string, u config.URL) (m Manifest, err error) {
	transport, err := outbound.Transport(env)
	if err != nil {
		return m, err
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{Timeout: fetchTimeout, Transport: transport, CheckRedirect: source.StayEncrypted}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return m, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return m, errors.Unwrap(err) // without the URL, which may have a secret
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return m, errors.New("the server answered " + resp.Status)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxManifest+1)) // it fails if it ends before its Content-Length
	if err != nil {
		return m, fmt.Errorf("the document can't be read to its end: %w", err)
	}
	if len(text) > maxManifest {
		return m, fmt.Errorf("the document has more than %d MiB", maxManifest>>20)
	}
	if err := source.CheckSum(&u.URL, text); err != nil {
		return m, err
	}
	if m = readManifest(text); len(m.Objects)+len(m.Problems) == 0 {
		return m, fmt.Errorf("the document, of %d bytes, has no object in it", len(text))
	}
	return m, nil
}
