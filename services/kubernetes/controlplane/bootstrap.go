package controlplane

import (
	"context"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
)

const (
	// initializedKey is in etcd for as long as the control plane is self-hosted: as pods of
	// the cluster itself. The releases before static pods have set it.
	initializedKey = "/garboard.dev/initialized"
	// initializedTimeout bounds one look at it.
	initializedTimeout = 10 * time.Second
	// initializedPeriod is how often it is looked for while it is there.
	initializedPeriod = 2 * time.Second
)

// BootstrapStatusController says whether the control plane is self-hosted: from the mark in
// etcd, once this node's member serves.
type BootstrapStatusController struct {
	initialized func(ctx context.Context, r resource.Reader, endpoint string) (bool, error)
}

func (c *BootstrapStatusController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	cfg, err := controlPlaneConfig(v)
	if err != nil || cfg == nil {
		return 0, err
	}
	before, err := BootstrapStatuses.Get(v, "control-plane")
	if err == nil && !before.Spec.SelfHosted {
		return 0, nil // it never becomes so
	}
	known := err == nil
	member, ready := etcd.Ready(v)
	if !ready {
		return 0, nil
	}
	ctx, cancel := context.WithTimeout(ctx, initializedTimeout)
	defer cancel()
	selfHosted, err := c.initialized(ctx, v, member.Endpoint)
	if err != nil {
		return 0, fmt.Errorf("look for the initialized status in etcd: %w", err)
	}
	switch {
	case !selfHosted:
		v.Log().Info("bootkube initialized status not found") // as static pods
	case !known:
		v.Log().Info("bootkube initialized status found: the control plane is self-hosted, and no static pods are written")
	}
	if err := BootstrapStatuses.Put(v, "control-plane", BootstrapStatus{SelfHosted: selfHosted}); err != nil || !selfHosted {
		return 0, err
	}
	return initializedPeriod, nil
}

// initialized looks for the mark in this node's member. Where the members disagree for a
// moment, the mark is only seen for longer.
func initialized(ctx context.Context, r resource.Reader, endpoint string) (bool, error) {
	client, err := etcd.Dial(ctx, r, endpoint)
	if err != nil {
		return false, err
	}
	defer client.Close()
	found, err := client.Get(ctx, initializedKey, clientv3.WithSerializable(), clientv3.WithCountOnly())
	if err != nil {
		return false, err
	}
	return found.Count > 0, nil
}

// RemoveInitialized removes the mark: the control plane isn't self-hosted any more.
func RemoveInitialized(ctx context.Context, r resource.Reader) error {
	return onMember(ctx, r, func(ctx context.Context, endpoint string) error {
		client, err := etcd.Dial(ctx, r, endpoint)
		if err != nil {
			return err
		}
		defer client.Close()
		if _, err := client.Delete(ctx, initializedKey); err != nil {
			return fmt.Errorf("remove %s from etcd: %w", initializedKey, err)
		}
		return nil
	})
}

// onMember does what a user has asked for in this node's member of etcd.
func onMember(ctx context.Context, r resource.Reader, do func(ctx context.Context, endpoint string) error) error {
	member, ready := etcd.Ready(r)
	if !ready {
		return errors.New("the member of etcd on this node isn't ready: gbctl service etcd")
	}
	ctx, cancel := context.WithTimeout(ctx, initializedTimeout)
	defer cancel()
	return do(ctx, member.Endpoint)
}
