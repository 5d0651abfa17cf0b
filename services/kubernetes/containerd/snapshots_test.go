package containerd

import (
	"context"
	"testing"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// The node's own containers have snapshots of the namespace of pods, and nothing else of it. A lease of one namespace
// isn't known in the other one.
func TestSnapshotsAreThoseOfPods(t *testing.T) {
	t.Parallel()
	const snapshots, images = "/containerd.services.snapshots.v1.Snapshots/Prepare", "/containerd.services.images.v1.Images/Get"
	for _, tc := range []struct {
		namespace, method, want string
		leased                  bool
	}{
		{Namespace, snapshots, PodNamespace, false},
		{Namespace, images, Namespace, true},
		{PodNamespace, snapshots, PodNamespace, true},
		{installerNamespace, snapshots, installerNamespace, true},
	} {
		called := false
		ctx := leases.WithLease(namespaces.WithNamespace(t.Context(), tc.namespace), "lease")
		err := ofPods(ctx, tc.method, nil, nil, nil, func(ctx context.Context, method string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
			called = true
			headers, _ := metadata.FromOutgoingContext(ctx)
			if got := headers.Get(namespaces.GRPCHeader); len(got) != 1 || got[0] != tc.want {
				t.Errorf("%s in %s is called in %q, want %s", method, tc.namespace, got, tc.want)
			}
			if leased := len(headers.Get(leases.GRPCHeader)) > 0; leased != tc.leased {
				t.Errorf("%s in %s: with a lease is %t", method, tc.namespace, leased)
			}
			return nil
		})
		if err != nil || !called {
			t.Errorf("%s in %s: %v, called: %t", tc.method, tc.namespace, err, called)
		}
	}
}
