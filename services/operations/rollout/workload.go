package rollout

import (
	"context"
	"fmt"

	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// AwaitWorkload waits until all pods of a DaemonSet or Deployment are of its present
// template, and ready.
func AwaitWorkload(ctx context.Context, p *operation.Progress, client *kubeclient.Client, ref kubeclient.Ref) error {
	return Poll(ctx, p, func(ctx context.Context) error {
		w, err := client.Get(ctx, ref)
		if kubeclient.IsNotFound(err) {
			return Lasting{Err: err}
		} else if err != nil {
			return err
		}
		return rolledOut(w)
	})
}

// rolledOut says why the pods of a DaemonSet or Deployment aren't all new and ready.
func rolledOut(w kubeclient.Object) error {
	number := func(path ...string) int { n, _ := w.At(path...).(float64); return int(n) }
	wanted, updated, ready := number("spec", "replicas"), number("status", "updatedReplicas"), number("status", "availableReplicas")
	if w.Kind() == "DaemonSet" {
		wanted, updated, ready = number("status", "desiredNumberScheduled"), number("status", "updatedNumberScheduled"), number("status", "numberAvailable")
	}
	if number("status", "observedGeneration") < number("metadata", "generation") || updated < wanted || ready < wanted {
		return fmt.Errorf("%s: %d of %d pods are updated, %d are available", w, updated, wanted, ready)
	}
	return nil
}
