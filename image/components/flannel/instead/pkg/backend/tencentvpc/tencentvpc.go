// Package tencentvpc is here instead of flannel's, which has a cloud provider's SDK.
package tencentvpc
