package controlplane

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

const (
	// driftPeriod is the maximum age of the results. A comparison reads each
	// object, about thirty, and does little else while nothing changes.
	driftPeriod = time.Minute
	// driftAgain is the pause if the apiserver is down.
	driftAgain = 5 * time.Second
	// driftBudget limits one comparison.
	driftBudget = time.Minute
	// maxDriftFields is how many fields of one object are reported; more don't help.
	maxDriftFields = 20

	driftType = "ManifestDrifts.kubernetes.garboard.dev"
)

// ManifestDrift is the difference between the cluster's objects and a bootstrap manifest.
// It is only reported: once made, the objects belong to the cluster's owner.
type ManifestDrift struct {
	Objects []ObjectDrift `yaml:"objects"` // only those that differ
}

// ObjectDrift is the difference of one object.
type ObjectDrift struct {
	Object  string   `yaml:"object"` // /v1/ConfigMap/coredns
	Missing bool     `yaml:"missing,omitempty"`
	Problem string   `yaml:"problem,omitempty"` // of one of the node's own that is missing
	Fields  []string `yaml:"fields,omitempty"`  // paths with another value than in the manifest: data.Corefile
}

// String is the drift as a column of a table.
func (d ManifestDrift) String() string {
	parts := lists.Of(d.Objects, func(o ObjectDrift) string {
		if o.Missing {
			return o.Object + ": missing"
		}
		return o.Object + ": " + strings.Join(o.Fields, ",")
	})
	return cmp.Or(strings.Join(parts, "; "), "none")
}

// ManifestDrifts have the namespaces and IDs of the manifests that they belong to.
var ManifestDrifts = resource.Define[ManifestDrift](resource.Definition{
	Type: driftType, Kind: "ManifestDrift", Namespace: namespace,
	Columns: []resource.Column{{Name: "DRIFT", Value: func(spec any) string { return spec.(ManifestDrift).String() }}},
})

// ManifestDriftController compares the cluster's objects with the bootstrap manifests
// that they were made from. The API server returns what the manifest would change (a
// dry run), so that defaults and other spellings of a value are no difference.
type ManifestDriftController struct {
	compared map[string]comparison // by the object's path
	client   kubeclient.Kept
}

// comparison is cached until one of both sides changes.
type comparison struct {
	wanted  kubeclient.Object
	version string
	fields  []string
}

func (c *ManifestDriftController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	manifests := inOrder(BootstrapManifests.List(v))
	if err := forget(v, ManifestDrifts, manifests); err != nil {
		return 0, err
	}
	keys, _, ready, err := ownCluster(v)
	if err != nil || !ready {
		return 0, err
	}
	if err := c.client.Use(throughBalancer(keys)); err != nil {
		return 0, err
	}
	defer c.client.Close() // its connections: the next comparison is a while away
	ctx, cancel := context.WithTimeout(ctx, driftBudget)
	defer cancel()
	if c.client.Ready(ctx) != nil {
		return driftAgain, nil // other controllers report that the apiserver is down
	}
	compared := make(map[string]comparison)
	var problems []error
	for _, m := range manifests {
		drift, err := c.compareManifest(ctx, m, compared)
		if err == nil {
			err = ManifestDrifts.In(m.Namespace).Put(v, m.ID, drift)
		}
		problems = append(problems, err)
		if ctx.Err() != nil {
			break
		}
	}
	c.compared = compared
	return driftPeriod, errors.Join(problems...)
}

// compareManifest compares the objects of one bootstrap manifest.
func (c *ManifestDriftController) compareManifest(ctx context.Context, m resource.Object[Manifest], compared map[string]comparison) (ManifestDrift, error) {
	drift := ManifestDrift{Objects: []ObjectDrift{}}
	for _, o := range m.Spec.Objects {
		d, err := c.compare(ctx, o, compared)
		if err != nil {
			return drift, err
		}
		if d.Missing && Own(m.Meta) {
			d.Problem = o.String() + " is missing"
		}
		if d.Missing || len(d.Fields) > 0 {
			drift.Objects = append(drift.Objects, d)
		}
	}
	return drift, nil
}

// forget removes what belongs to bootstrap manifests that are gone.
func forget[S any](v resource.View, kind *resource.Kind[S], manifests []resource.Object[Manifest]) error {
	for _, namespace := range []string{namespace, extrasNamespace} {
		wanted := map[string]bool{}
		for _, m := range manifests {
			wanted[m.ID] = wanted[m.ID] || m.Namespace == namespace
		}
		if err := prune(v, kind.In(namespace), wanted); err != nil {
			return err
		}
	}
	return nil
}

// compare compares one object. It asks for the manifest's changes only if
// either side has changed since the last time.
func (c *ManifestDriftController) compare(ctx context.Context, wanted kubeclient.Object, compared map[string]comparison) (ObjectDrift, error) {
	d := ObjectDrift{Object: wanted.String()}
	there, err := c.client.Get(ctx, wanted.Ref())
	if kubeclient.IsNotFound(err) {
		d.Missing = true
		return d, nil
	}
	if err != nil {
		return d, err
	}
	// A status that changes with every heartbeat doesn't count; changes by users
	// increment the generation, if the kind has one.
	version := there.ResourceVersion()
	if generation := there.At("metadata", "generation"); generation != nil {
		version = fmt.Sprint("generation ", generation, there.At("metadata", "labels"), there.At("metadata", "annotations"))
	}
	key := wanted.Namespace() + wanted.String()
	last, known := c.compared[key]
	if !known || last.version != version || !reflect.DeepEqual(last.wanted, wanted) {
		last = comparison{wanted: wanted, version: version}
		fields, err := preview(ctx, c.client.Client, there, wanted)
		if err != nil {
			return d, err
		}
		last.fields = lists.Of(fields, func(f difference) string { return f.path })
	}
	compared[key] = last
	d.Fields = last.fields
	return d, nil
}

// preview asks the API server which fields of an object a bootstrap manifest would change.
func preview(ctx context.Context, client *kubeclient.Client, there, wanted kubeclient.Object) ([]difference, error) {
	var refused *kubeclient.StatusError
	changed, err := client.Preview(ctx, wanted)
	switch {
	case err == nil:
		return differences(owned(there), owned(changed)), nil
	case errors.As(err, &refused) && refused.Code < http.StatusInternalServerError:
		// a field that can't change any more, mostly, or a policy
		return []difference{{path: "(" + err.Error() + ")"}}, nil
	}
	return nil, err
}

// Differences are what a bootstrap manifest would change in an object of the cluster, a
// line for each field; none where the object is missing, as it is made anyway.
func Differences(ctx context.Context, client *kubeclient.Client, wanted kubeclient.Object) (lines []string, err error) {
	there, err := client.Get(ctx, wanted.Ref())
	if err != nil {
		return nil, kubeclient.IgnoreNotFound(err)
	}
	fields, err := preview(ctx, client, there, wanted)
	for _, f := range fields {
		if wanted.Kind() == "Secret" || f.from == nil && f.to == nil {
			lines = append(lines, f.path)
		} else {
			lines = append(lines, fmt.Sprintf("%s: %s → %s", f.path, shown(f.from), shown(f.to)))
		}
	}
	return lines, err
}

// maxShown bounds a value in a line, in bytes.
const maxShown = 120

func shown(value any) string {
	if value == nil {
		return "(none)"
	}
	text, err := json.Marshal(value)
	if err != nil {
		return err.Error()
	}
	return config.Shorten(string(text), maxShown)
}

// owned is an object without what the API server keeps there itself.
func owned(o kubeclient.Object) map[string]any {
	clone := maps.Clone(map[string]any(o))
	delete(clone, "status")
	if metadata, ok := clone["metadata"].(map[string]any); ok {
		metadata = maps.Clone(metadata)
		for _, field := range []string{"managedFields", "resourceVersion", "generation", "creationTimestamp"} {
			delete(metadata, field)
		}
		notes, _ := metadata["annotations"].(map[string]any)
		notes = maps.Clone(notes)
		delete(notes, "deprecated.daemonset.template.generation")
		metadata["annotations"] = notes
		clone["metadata"] = metadata
	}
	return clone
}

// difference is a field with two values.
type difference struct {
	path     string
	from, to any
}

// differences of two objects, in the order of their paths, at most maxDriftFields of them.
func differences(a, b any) (paths []difference) {
	var walk func(path string, a, b any)
	walk = func(path string, a, b any) {
		if len(paths) >= maxDriftFields {
			return
		}
		if am, ok := a.(map[string]any); ok {
			if bm, ok := b.(map[string]any); ok {
				keys := slices.AppendSeq(slices.Collect(maps.Keys(am)), maps.Keys(bm))
				slices.Sort(keys)
				for _, key := range slices.Compact(keys) {
					walk(strings.TrimPrefix(path+"."+key, "."), am[key], bm[key])
				}
				return
			}
		}
		if al, ok := a.([]any); ok {
			if bl, ok := b.([]any); ok && len(al) == len(bl) {
				for i := range al {
					walk(path+"["+strconv.Itoa(i)+"]", al[i], bl[i])
				}
				return
			}
		}
		if !reflect.DeepEqual(a, b) {
			paths = append(paths, difference{path, a, b})
		}
	}
	walk("", a, b)
	return paths
}
