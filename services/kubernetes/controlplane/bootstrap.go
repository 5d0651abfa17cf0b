package controlplane

import (
	"context"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
)

// BootstrapStatusController reports that the control plane isn't self-hosted: here
// it never was. For a control plane that is converted, the cluster has the answer.
type BootstrapStatusController struct{}

func (*BootstrapStatusController) Reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	c, err := controlPlaneConfig(v)
	if err != nil || c == nil {
		return 0, err
	}
	if _, err := BootstrapStatuses.Get(v, "control-plane"); err == nil {
		return 0, nil
	}
	v.Log().Info("bootkube initialized status not found") // S-277: as static pods
	return 0, BootstrapStatuses.Put(v, "control-plane", BootstrapStatus{})
}
