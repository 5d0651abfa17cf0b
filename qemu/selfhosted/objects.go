package selfhosted

import (
	"encoding/base64"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/oci"
)

const (
	checkpointer = "pod-checkpointer"
	apiServer    = "kube-apiserver"
	manager      = "kube-controller-manager"
	scheduler    = "kube-scheduler"

	// mount is where the pods have the files of their Secrets.
	mount = "/etc/kubernetes/secrets"
	// wanted is the annotation of pods that the pod-checkpointer keeps alive.
	wanted = "checkpointer.alpha.coreos.com/checkpoint"

	initializedKey = "/garboard.dev/initialized"
	advertise      = "--advertise-address="
)

// programs are the static pods that become DaemonSets of the same name.
var programs = []string{apiServer, manager, scheduler}

// ownDirs are the directories of a node whose files only static pods have: they are new after
// each boot.
var ownDirs = []string{"/system/secrets/", "/etc/kubernetes/"}

// daemonSet returns the DaemonSet of a static pod, and the directories of the node with the
// files for its Secret, which has the same name.
func daemonSet(name string, pod object) (set object, dirs []string) {
	spec := part(pod, "spec")
	delete(spec, "priority") // from priorityClassName
	container := spec["containers"].([]any)[0].(object)
	delete(spec, "securityContext") // such programs were root, as the owner of their Secrets' files is
	delete(container, "securityContext")
	at := map[string]string{} // where the container has the volumes that are in the Secret
	var volumes, mounts []any
	for _, v := range items(spec, "volumes") {
		host, _ := part(v, "hostPath")["path"].(string)
		if slices.ContainsFunc(ownDirs, func(dir string) bool { return strings.HasPrefix(host, dir) }) {
			dirs = append(dirs, host)
			at[v["name"].(string)] = ""
			continue
		}
		volumes = append(volumes, v)
	}
	for _, m := range items(container, "volumeMounts") {
		if _, gone := at[m["name"].(string)]; gone {
			at[m["name"].(string)] = m["mountPath"].(string)
			continue
		}
		mounts = append(mounts, m)
	}
	command, _ := container["command"].([]any)
	for i, arg := range command {
		text, _ := arg.(string)
		for _, path := range at {
			text = strings.ReplaceAll(text, path+"/", mount+"/")
		}
		if strings.HasPrefix(text, advertise) {
			text = advertise + "$(POD_IP)"
		}
		command[i] = text
	}
	container["env"] = []any{fieldEnv("POD_IP", "status.podIP")}
	container["volumeMounts"] = append(mounts, object{"name": "secrets", "mountPath": mount, "readOnly": true})
	spec["volumes"] = append(volumes, secretVolume(name))
	return asDaemonSet(name, spec), dirs
}

func part(o object, field string) object {
	p, _ := o[field].(object)
	return p
}

func items(o object, field string) (all []object) {
	list, _ := o[field].([]any)
	for _, item := range list {
		if i, ok := item.(object); ok {
			all = append(all, i)
		}
	}
	return all
}

func fieldEnv(name, path string) object {
	return object{"name": name, "valueFrom": object{"fieldRef": object{"fieldPath": path}}}
}

func secretVolume(name string) object {
	return object{"name": "secrets", "secret": object{"secretName": name}}
}

// asDaemonSet returns a DaemonSet that runs a pod on all control planes.
func asDaemonSet(name string, spec object) object {
	spec["hostNetwork"] = true
	spec["tolerations"] = []any{object{"operator": "Exists"}}
	spec["nodeSelector"] = object{"node-role.kubernetes.io/control-plane": ""}
	spec["automountServiceAccountToken"] = false
	return object{
		"apiVersion": "apps/v1",
		"kind":       "DaemonSet",
		"metadata":   object{"name": name, "namespace": namespace, "labels": object{"k8s-app": name, "tier": "control-plane"}},
		"spec": object{
			"selector":       object{"matchLabels": object{"k8s-app": name}},
			"updateStrategy": object{"type": "RollingUpdate", "rollingUpdate": object{"maxUnavailable": 1}},
			"template": object{
				"metadata": object{
					"labels":      object{"k8s-app": name, "tier": "control-plane"},
					"annotations": object{wanted: "true"},
				},
				"spec": spec,
			},
		},
	}
}

func checkpointerDaemonSet() object {
	return asDaemonSet(checkpointer, object{
		"priorityClassName": "system-node-critical",
		"containers": []any{object{
			"name":    checkpointer,
			"image":   oci.PodCheckpointerImage,
			"command": []any{"/usr/local/bin/pod-checkpointer", "--kubeconfig=" + mount + "/kubeconfig"},
			"env":     []any{fieldEnv("NODE_NAME", "spec.nodeName")},
			"volumeMounts": []any{
				object{"name": "secrets", "mountPath": mount, "readOnly": true},
				object{"name": "state", "mountPath": stateDir},
				object{"name": "manifests", "mountPath": "/etc/kubernetes/manifests"},
				object{"name": "runtime", "mountPath": "/run/containerd"},
			},
		}},
		"volumes": []any{
			secretVolume(checkpointer),
			object{"name": "state", "hostPath": object{"path": stateDir, "type": "DirectoryOrCreate"}},
			object{"name": "manifests", "hostPath": object{"path": "/etc/kubernetes/manifests"}},
			// The directory, because containerd makes a new socket when it starts.
			object{"name": "runtime", "hostPath": object{"path": "/run/containerd"}},
		},
	})
}

func secret(name string, files map[string][]byte) object {
	data := object{}
	for key, value := range files {
		data[key] = base64.StdEncoding.EncodeToString(value)
	}
	return object{"apiVersion": "v1", "kind": "Secret", "metadata": object{"name": name, "namespace": namespace}, "data": data}
}

// accessObjects let the pod-checkpointer read the pods and what they refer to.
func accessObjects() []object {
	const group = "rbac.authorization.k8s.io"
	return []object{
		{
			"apiVersion": group + "/v1", "kind": "ClusterRole", "metadata": object{"name": checkpointer},
			"rules": []any{
				object{"apiGroups": []any{""}, "resources": []any{"pods"}, "verbs": []any{"list"}},
				object{"apiGroups": []any{""}, "resources": []any{"secrets", "configmaps"}, "verbs": []any{"get"}},
			},
		},
		{
			"apiVersion": group + "/v1", "kind": "ClusterRoleBinding", "metadata": object{"name": checkpointer},
			"roleRef":  object{"apiGroup": group, "kind": "ClusterRole", "name": checkpointer},
			"subjects": []any{object{"apiGroup": group, "kind": "User", "name": checkpointer}},
		},
	}
}

// markPod returns a pod that writes the mark of a self-hosted control plane to the etcd of a
// control plane.
func markPod(node string) object {
	return object{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": object{"name": "mark-self-hosted", "namespace": namespace},
		"spec": object{
			"nodeName": node, "hostNetwork": true, "restartPolicy": "OnFailure", "automountServiceAccountToken": false,
			"tolerations": []any{object{"operator": "Exists"}},
			"containers": []any{object{
				"name": "etcdctl", "image": config.DefaultEtcdImage,
				"command": []any{
					"/usr/local/bin/etcdctl", "--endpoints=https://127.0.0.1:2379", "--cacert=" + mount + "/etcd-client-ca.crt",
					"--cert=" + mount + "/etcd-client.crt", "--key=" + mount + "/etcd-client.key", "put", initializedKey, "true",
				},
				"volumeMounts": []any{object{"name": "secrets", "mountPath": mount, "readOnly": true}},
			}},
			"volumes": []any{secretVolume(apiServer)},
		},
	}
}
