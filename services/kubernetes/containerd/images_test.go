package containerd

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// An image goes with all its names, and stays if one of them is in use. One that can't go keeps
// the others, too.
func TestRemovableImages(t *testing.T) {
	t.Parallel()
	digests := map[string]string{
		"registry.k8s.io/etcd:1": "sha256:aa",
		"docker.io/web:1":        "sha256:bb", "docker.io/web@sha256:bb": "sha256:bb", "sha256:b0": "sha256:bb",
		"docker.io/db:1": "sha256:cc", "sha256:c0": "sha256:cc",
		"docker.io/old:1": "sha256:dd",
	}
	users := map[string]string{
		"registry.k8s.io/etcd:1": "the configuration (cluster.etcd.image)",
		"sha256:c0":              "pod default/db",
		"docker.io/never:1":      "every pod", // isn't there
	}
	web := []string{"docker.io/web:1", "docker.io/web@sha256:bb", "sha256:b0"}
	for _, tt := range []struct {
		refs, want []string
		refused    string
		is         error
	}{
		{refs: []string{"docker.io/web:1"}, want: web},
		{refs: []string{"sha256:bb", "sha256:b0", "docker.io/old:1"}, want: append([]string{"docker.io/old:1"}, web...)},
		{refs: []string{"docker.io/db:1"}, refused: "image in use: docker.io/db:1, by pod default/db", is: ErrImageInUse},
		{refs: []string{"sha256:cc", "docker.io/old:1"}, refused: "by pod default/db", is: ErrImageInUse},
		{refs: []string{"registry.k8s.io/etcd:1"}, refused: "by the configuration (cluster.etcd.image)", is: ErrImageInUse},
		{refs: []string{"docker.io/old:2", "docker.io/old:1"}, refused: `image "docker.io/old:2": not found`, is: errdefs.ErrNotFound},
		{refs: []string{""}, refused: `image "": not found`, is: errdefs.ErrNotFound},
	} {
		names, err := removable(digests, users, tt.refs)
		if tt.is != nil && (!errors.Is(err, tt.is) || !strings.Contains(err.Error(), tt.refused)) {
			t.Errorf("%q: %v, want %s", tt.refs, err, tt.refused)
		}
		if tt.is == nil && (err != nil || !slices.Equal(names, tt.want)) {
			t.Errorf("%q: %q, %v, want %q", tt.refs, names, err, tt.want)
		}
	}
}
